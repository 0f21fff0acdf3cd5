// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <stdexcept>

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

}  // namespace

void bind_checksum(py::module_& m) {
  m.def("page_checksums", &page_checksums, py::arg("pages"), py::arg("page_bytes"),
        py::arg("zero_at"),
        "The XXH3-128 of each page in the buffer, one after the other, with the 16 bytes at\n"
        "`zero_at` of each page taken as zero.");
}
