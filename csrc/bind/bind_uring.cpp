// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "io/uring_device.h"

namespace py = pybind11;

namespace {

using attnstore::Op;
using attnstore::Request;
using attnstore::Span;
using attnstore::UringDevice;
using Seconds = std::chrono::duration<double>;

constexpr std::uintptr_t kAlignment = 4096;

void expect(bool ok, const char* what) {
  if (ok) return;
  PyErr_SetString(PyExc_AssertionError, what);
  throw py::error_already_set();
}

// Where a buffer lies. The caller keeps it alive, as io/device.py says.
Span as_span(py::handle buffer, bool is_writable) {
  Py_buffer view;
  const int flags = is_writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
  if (PyObject_GetBuffer(buffer.ptr(), &view, flags) != 0) throw py::error_already_set();
  const Span span{static_cast<std::byte*>(view.buf), static_cast<std::size_t>(view.len)};
  PyBuffer_Release(&view);
  expect(reinterpret_cast<std::uintptr_t>(span.data) % kAlignment == 0, "the buffer is unaligned");
  expect(span.num_bytes % kAlignment == 0, "the buffer's length is not aligned");
  return span;
}

// (tag, op, offset, buffers, seals, checksum, stride)
Request as_request(const py::tuple& fields) {
  Request request;
  request.tag = fields[0].cast<std::int64_t>();
  request.op = static_cast<Op>(fields[1].cast<int>());
  request.offset = fields[2].cast<std::uint64_t>();
  const auto seals = fields[4].cast<py::tuple>();
  bool is_writable = request.op == Op::kRead || !seals.empty();
  for (const py::handle buffer : fields[3].cast<py::tuple>()) {
    request.buffers.push_back(as_span(buffer, is_writable));
    is_writable = request.op == Op::kRead;  // seals go into the first one only
  }
  for (const py::handle item : seals) {
    const auto seal = item.cast<std::pair<std::size_t, std::size_t>>();
    expect(seal.first < request.buffers.size(), "a seal is of no buffer");
    expect(seal.second + attnstore::kChecksumBytes <= request.buffers[0].num_bytes,
           "a seal does not fit into buffer 0");
    request.seals.push_back({seal.first, seal.second});
  }
  request.checksum = fields[5].cast<bool>();
  expect(!request.checksum || !request.buffers.empty(), "there is nothing to take a checksum of");
  request.stride = fields[6].cast<std::uint64_t>();
  for (const Span& buffer : request.buffers) {
    expect(request.stride == 0 || buffer.num_bytes == request.buffers[0].num_bytes,
           "strided buffers have one length");
  }
  return request;
}

std::unique_ptr<UringDevice> make_device(
    int fd, std::uint32_t depth, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& in,
    std::size_t piece_bytes, int num_hash_threads) {
  if (depth == 0 || piece_bytes == 0 || piece_bytes % kAlignment != 0) {
    throw std::invalid_argument("the depth must be above 0, a piece whole aligned pages");
  }
  std::vector<Span> regions;
  for (const auto& [address, num_bytes] : in) {
    regions.push_back({reinterpret_cast<std::byte*>(address), num_bytes});
  }
  try {
    const py::gil_scoped_release release;
    return std::make_unique<UringDevice>(
        attnstore::UringOptions{fd, depth, std::move(regions), piece_bytes, num_hash_threads});
  } catch (const std::system_error& error) {
    const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw py::error_already_set();
  }
}

bool submit_all(UringDevice& self, const py::sequence& items) {
  std::vector<Request> requests;
  requests.reserve(items.size());
  for (const py::handle item : items) requests.push_back(as_request(item.cast<py::tuple>()));
  const py::gil_scoped_release release;
  return self.submit(std::move(requests));
}

py::list poll_device(UringDevice& self, double timeout_s) {
  std::vector<attnstore::Ended> ended;
  {
    const py::gil_scoped_release release;
    ended = self.poll(Seconds(timeout_s));
  }
  py::list found;
  for (const auto& one : ended) {
    const auto* const sum = reinterpret_cast<const char*>(one.checksum.data());
    const py::bytes checksum(sum, one.has_checksum ? one.checksum.size() : 0);
    found.append(py::make_tuple(one.tag, one.error, one.text, checksum));
  }
  return found;
}

}  // namespace

void bind_uring(py::module_& m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<UringDevice>(m, "Uring",
                          "A file through io_uring. Takes over `fd`. Raises OSError if the kernel\n"
                          "gives no io_uring. Requests are tuples of io.device.IoRequest's fields.")
      .def(py::init(&make_device), py::kw_only(), py::arg("fd"), py::arg("depth"),
           py::arg("regions"), py::arg("piece_bytes"), py::arg("num_hash_threads"))
      .def_property_readonly("has_regions", &UringDevice::has_regions)
      .def("submit", &submit_all, py::arg("requests"), "False if it is closed: nothing was queued.")
      .def("cancel", &UringDevice::cancel, py::arg("tags"), free)
      .def("poll", &poll_device, py::arg("timeout_s"), "[(tag, errno or 0, text, checksum), ...]")
      // With the interpreter's lock, or the thread that wakes would have its turn at once, in the
      // midst of a step.
      .def("wake", &UringDevice::wake)
      .def("failure", &UringDevice::failure, free, "Why it serves nothing any more, or empty.")
      .def(
          "close",
          [](UringDevice& self, double timeout_s) { return self.close(Seconds(timeout_s)); },
          py::arg("timeout_s"), free);
}
