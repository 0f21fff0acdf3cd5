// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>

#include "bind/bindings.h"
#include "codec/lossless.h"
#include "codec/quantized.h"

namespace py = pybind11;

namespace {

struct Bytes {
  std::uint8_t* data;
  std::size_t size;
};

/// The memory of a contiguous buffer, which the caller keeps.
Bytes bytes_of(const py::buffer_info& info) {
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw std::invalid_argument("the buffer is not contiguous");
  }
  return {static_cast<std::uint8_t*>(info.ptr),
          static_cast<std::size_t>(info.size * info.itemsize)};
}

std::size_t encode(const py::buffer& raw, const py::buffer& out, bool fast) {
  const py::buffer_info from = raw.request();
  const py::buffer_info to = out.request(true);
  const Bytes source = bytes_of(from);
  const Bytes target = bytes_of(to);
  const py::gil_scoped_release release;
  return attnstore::codec::lossless_encode(source.data, source.size, target.data, target.size,
                                           fast);
}

bool decode(const py::buffer& encoded, const py::buffer& out) {
  const py::buffer_info from = encoded.request();
  const py::buffer_info to = out.request(true);
  const Bytes source = bytes_of(from);
  const Bytes target = bytes_of(to);
  const py::gil_scoped_release release;
  return attnstore::codec::lossless_decode(source.data, source.size, target.data, target.size);
}

using Fields = std::array<std::int32_t, attnstore::codec::kFields>;

attnstore::codec::Quantized shape_of(const Fields& fields) {
  attnstore::codec::Quantized shape{};
  std::memcpy(&shape, fields.data(), sizeof shape);
  return shape;
}

std::size_t quantized_size(const Fields& fields, std::size_t raw_bytes) {
  const attnstore::codec::Quantized shape = shape_of(fields);
  return is_valid(shape, raw_bytes) ? quantized_bytes(shape) : 0;
}

std::size_t quantize(const Fields& fields, const py::buffer& raw, const py::buffer& out) {
  const py::buffer_info from = raw.request();
  const py::buffer_info to = out.request(true);
  const Bytes source = bytes_of(from);
  const Bytes target = bytes_of(to);
  const py::gil_scoped_release release;
  return attnstore::codec::quantized_encode(shape_of(fields), source.data, source.size, target.data,
                                            target.size);
}

bool dequantize(std::int32_t kind, const py::buffer& encoded, const py::buffer& out) {
  const py::buffer_info from = encoded.request();
  const py::buffer_info to = out.request(true);
  const Bytes source = bytes_of(from);
  const Bytes target = bytes_of(to);
  const py::gil_scoped_release release;
  return attnstore::codec::quantized_decode(kind, source.data, source.size, target.data,
                                            target.size);
}

}  // namespace

void bind_codec(py::module_& m) {
  m.def("lossless_bound", &attnstore::codec::lossless_bound, py::arg("raw_bytes"),
        "The most bytes that encoding so many may take.");
  m.def("lossless_encode", &encode, py::arg("raw"), py::arg("out"), py::arg("fast"),
        "Encode the whole buffer. Returns the bytes written; 0: `out` has too few. Fast: in more "
        "bytes that are decoded faster, if there is room for them.");
  m.def("lossless_decode", &decode, py::arg("encoded"), py::arg("out"),
        "Fill `out`. False if that is not what was encoded; `out` may have been written to then.");
  m.def("quantized_bytes", &quantized_size, py::arg("fields"), py::arg("raw_bytes"),
        "Bytes of an encoding without outliers; 0: the fields (csrc/codec/quantized.h) are not of "
        "a payload of so many bytes.");
  m.def("quantized_encode", &quantize, py::arg("fields"), py::arg("raw"), py::arg("out"),
        "Encode the whole buffer. Returns the bytes written; 0: `out` has too few, or the fields "
        "are of another payload.");
  m.def("quantized_decode", &dequantize, py::arg("kind"), py::arg("encoded"), py::arg("out"),
        "Fill `out`. False if that is not what was encoded; `out` may have been written to then.");
}
