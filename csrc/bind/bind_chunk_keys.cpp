// SPDX-License-Identifier: Apache-2.0
// Tokens and keys for Python: see index/keys.py.
#include <pybind11/pybind11.h>
#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>  // of later versions Python.h has it
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "index/chunk_keys.h"

namespace py = pybind11;

namespace {

using attnstore::ChunkText;
using attnstore::Digest;

constexpr Py_ssize_t kTokenBytes = 4;
// An id that is read so soon is on its way from memory: the objects of a long prompt are in no
// cache.
constexpr Py_ssize_t kAhead = 24;

// A token id modulo 2^32: one that is no token must not raise.
std::uint32_t number_of(PyObject* id) {
  // Of an int no code of Python's is run that could change the list.
  if (!PyLong_Check(id)) throw py::type_error("a token id is no int");
#if PY_VERSION_HEX < 0x030C0000
  if (Py_SIZE(id) == 1) return reinterpret_cast<PyLongObject*>(id)->ob_digit[0];
#else
  auto* const number = reinterpret_cast<PyLongObject*>(id);
  if (PyUnstable_Long_IsCompact(number)) {
    return static_cast<std::uint32_t>(PyUnstable_Long_CompactValue(number));
  }
#endif
  return static_cast<std::uint32_t>(PyLong_AsUnsignedLongLongMask(id));
}

// Encodes ids of a list, a block of them at each step. The list must not change meanwhile.
class Encoder {
 public:
  explicit Encoder(const py::list& ids)
      : items_(PySequence_Fast_ITEMS(ids.ptr())), size_(PyList_GET_SIZE(ids.ptr())) {}

  // The ids [start, stop) are next. The list has them.
  void begin(Py_ssize_t start, Py_ssize_t stop) {
    made_ = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, (stop - start) * kTokenBytes));
    if (!made_) throw py::error_already_set();
    to_ = PyBytes_AS_STRING(made_.ptr());
    at_ = start;
    stop_ = stop;
  }

  void step() { encode(std::min(at_ + kStepTokens, stop_)); }

  py::bytes finish() {
    encode(stop_);
    return std::move(made_);
  }

 private:
  static constexpr Py_ssize_t kStepTokens = 18;  // a block of the hash has 16, but the last no step

  void encode(Py_ssize_t stop) {
    for (; at_ < stop; ++at_, to_ += kTokenBytes) {
      if (at_ + kAhead < size_) __builtin_prefetch(items_[at_ + kAhead]);
      const auto encoded = __builtin_bswap32(number_of(items_[at_]));
      std::memcpy(to_, &encoded, kTokenBytes);
    }
  }

  PyObject* const* items_;
  Py_ssize_t size_;
  py::bytes made_;
  char* to_ = nullptr;
  Py_ssize_t at_ = 0;
  Py_ssize_t stop_ = 0;
};

py::bytes encode_tokens(const py::list& ids) {
  Encoder encoder(ids);
  encoder.begin(0, PyList_GET_SIZE(ids.ptr()));
  return encoder.finish();
}

void check_chunks(const py::list& ids, Py_ssize_t chunk_tokens, Py_ssize_t first, Py_ssize_t stop) {
  if (chunk_tokens <= 0 || first < 0 || stop < first ||
      stop > PyList_GET_SIZE(ids.ptr()) / chunk_tokens) {
    throw std::invalid_argument("not so many whole chunks");
  }
}

py::list encode_chunks(const py::list& ids, Py_ssize_t chunk_tokens, Py_ssize_t first,
                       Py_ssize_t stop) {
  check_chunks(ids, chunk_tokens, first, stop);
  Encoder encoder(ids);
  py::list chunks;
  for (Py_ssize_t chunk = first; chunk < stop; ++chunk) {
    encoder.begin(chunk * chunk_tokens, (chunk + 1) * chunk_tokens);
    chunks.append(encoder.finish());
  }
  return chunks;
}

// While a chunk is hashed the one behind it is encoded.
py::tuple hash_chunks(const py::list& ids, Py_ssize_t chunk_tokens, Py_ssize_t first,
                      Py_ssize_t stop, const py::bytes& parent, const py::tuple& extras) {
  check_chunks(ids, chunk_tokens, first, stop);
  if (!extras.empty() && static_cast<Py_ssize_t>(extras.size()) != stop - first) {
    throw std::invalid_argument("not one extra a chunk");
  }
  Encoder encoder(ids);
  const auto begin = [&](Py_ssize_t chunk) {
    encoder.begin(chunk * chunk_tokens, std::min(chunk + 1, stop) * chunk_tokens);
  };
  py::list chunks;
  py::list keys;
  py::bytes last = parent;
  std::string scratch;
  const attnstore::Beside beside = [&encoder] { encoder.step(); };
  begin(first);
  for (Py_ssize_t chunk = first; chunk < stop; ++chunk) {
    const py::bytes tokens = encoder.finish();
    ChunkText text = {{}, tokens};
    if (!extras.empty()) text.extra = py::cast<std::string_view>(extras[chunk - first]);
    begin(chunk + 1);
    const Digest key = attnstore::chunk_key(last, text, scratch, beside);
    last = py::bytes(reinterpret_cast<const char*>(key.data()), key.size());
    chunks.append(tokens);
    keys.append(last);
  }
  return py::make_tuple(chunks, keys);
}

}  // namespace

void bind_chunk_keys(py::module_& m) {
  m.def("encode_tokens", &encode_tokens, py::arg("token_ids"),
        "The ids of a list as big-endian uint32. Cost: about 3 ns a token.");
  m.def("encode_chunks", &encode_chunks, py::arg("token_ids"), py::arg("chunk_tokens"),
        py::arg("first"), py::arg("stop"),
        "The same of the whole chunks [first, stop) of a list, a bytes object for each.");
  m.def(
      "hash_chunks", &hash_chunks, py::arg("token_ids"), py::arg("chunk_tokens"), py::arg("first"),
      py::arg("stop"), py::arg("parent"), py::arg("extras"),
      "These chunks, encoded, and their keys. The first of them continues `parent`, each other\n"
      "the one before it. Extras: none means that all are empty. Cost: about 2 us a chunk of 256\n"
      "tokens, with the GIL.");
}
