// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "io/checksum.h"

namespace py = pybind11;

namespace {

py::bytes page_checksums(const py::buffer& pages, std::size_t page_bytes, std::size_t zero_at) {
  const py::buffer_info info = pages.request();
  const auto num_bytes = static_cast<std::size_t>(info.size * info.itemsize);
  if (page_bytes == 0 || num_bytes % page_bytes != 0) {
    throw std::invalid_argument("the buffer is not whole pages");
  }
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw std::invalid_argument("the buffer is not contiguous");
  }
  if (page_bytes < attnstore::kChecksumBytes || zero_at > page_bytes - attnstore::kChecksumBytes) {
    throw std::invalid_argument("zero_at is not inside a page");
  }
  const std::size_t num_pages = num_bytes / page_bytes;
  const auto size = static_cast<Py_ssize_t>(num_pages * attnstore::kChecksumBytes);
  auto sums = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
  if (!sums) throw py::error_already_set();
  auto* const out = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(sums.ptr()));
  const py::gil_scoped_release release;
  attnstore::page_checksums(static_cast<const std::byte*>(info.ptr), num_pages, page_bytes, zero_at,
                            out);
  return sums;
}

// The buffer's bytes. It must outlive what is made of them.
std::pair<std::byte*, std::size_t> bytes_of(const py::buffer_info& info) {
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw std::invalid_argument("a buffer is not contiguous");
  }
  return {static_cast<std::byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
}

using Copies = std::vector<std::pair<py::buffer, std::vector<py::buffer>>>;

py::bytes copy_checksums(const Copies& copies) {
  std::vector<py::buffer_info> open;  // they keep the buffers where they are
  std::vector<attnstore::Gathered> gathered;
  for (const auto& [to, of] : copies) {
    open.push_back(to.request(/*writable=*/true));
    attnstore::Gathered one{};
    std::tie(one.to, one.num_bytes) = bytes_of(open.back());
    std::size_t num_bytes = 0;
    for (const auto& part : of) {
      open.push_back(part.request());
      const auto [at, size] = bytes_of(open.back());
      one.of.push_back({reinterpret_cast<const unsigned char*>(at), size});
      num_bytes += size;
    }
    if (num_bytes != one.num_bytes) {
      throw std::invalid_argument("a buffer is not as long as what it is to hold");
    }
    gathered.push_back(std::move(one));
  }
  const auto size = static_cast<Py_ssize_t>(gathered.size() * attnstore::kChecksumBytes);
  auto sums = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
  if (!sums) throw py::error_already_set();
  auto* const out = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(sums.ptr()));
  {
    const py::gil_scoped_release release;
    attnstore::copy_checksums(gathered, out);
  }
  return sums;
}

}  // namespace

void bind_checksum(py::module_& m) {
  m.def("page_checksums", &page_checksums, py::arg("pages"), py::arg("page_bytes"),
        py::arg("zero_at"),
        "The XXH3-128 of each page in the buffer, one after the other, with the 16 bytes at\n"
        "`zero_at` of each page taken as zero.");
  m.def("copy_checksums", &copy_checksums, py::arg("copies"),
        "Fill each first buffer with what the others have, one behind the other. Returns the\n"
        "XXH3-128 of each copy, one after the other.");
}
