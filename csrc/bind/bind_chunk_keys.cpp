// SPDX-License-Identifier: Apache-2.0
// Tokens and keys for Python: see index/keys.py.
#include <pybind11/pybind11.h>
#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>  // of later versions Python.h has it
#endif

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "index/chunk_keys.h"

namespace py = pybind11;

namespace {

using attnstore::ChunkText;
using attnstore::Digest;

constexpr Py_ssize_t kTokenBytes = 4;
// Fewer are hashed before another thread could give the lock back: it keeps it for 5 ms.
constexpr std::size_t kUnlockedMin = 256;

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

// The ids [start, stop) of a list, which has them.
py::bytes encode(const py::list& ids, Py_ssize_t start, Py_ssize_t stop) {
  auto made = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, (stop - start) * kTokenBytes));
  if (!made) throw py::error_already_set();
  char* to = PyBytes_AS_STRING(made.ptr());
  PyObject* const* const items = PySequence_Fast_ITEMS(ids.ptr());
  const Py_ssize_t size = PyList_GET_SIZE(ids.ptr());
  for (Py_ssize_t at = start; at < stop; ++at, to += kTokenBytes) {
    if (at + kAhead < size) __builtin_prefetch(items[at + kAhead]);
    const auto encoded = __builtin_bswap32(number_of(items[at]));
    std::memcpy(to, &encoded, kTokenBytes);
  }
  return made;
}

py::bytes encode_tokens(const py::list& ids) { return encode(ids, 0, PyList_GET_SIZE(ids.ptr())); }

py::list encode_chunks(const py::list& ids, Py_ssize_t chunk_tokens, Py_ssize_t first,
                       Py_ssize_t stop) {
  const Py_ssize_t size = PyList_GET_SIZE(ids.ptr());
  if (chunk_tokens <= 0 || first < 0 || stop < first || stop > size / chunk_tokens) {
    throw std::invalid_argument("not so many whole chunks");
  }
  py::list chunks;
  for (Py_ssize_t chunk = first; chunk < stop; ++chunk) {
    chunks.append(encode(ids, chunk * chunk_tokens, (chunk + 1) * chunk_tokens));
  }
  return chunks;
}

py::list chain_keys(const py::bytes& parent, const py::tuple& chunks, const py::tuple& extras) {
  if (!extras.empty() && extras.size() != chunks.size()) {
    throw std::invalid_argument("not one extra a chunk");
  }
  std::vector<ChunkText> texts(chunks.size());  // of bytes that the tuples keep alive
  for (std::size_t i = 0; i < texts.size(); ++i) {
    texts[i].tokens = py::cast<std::string_view>(chunks[i]);
    if (!extras.empty()) texts[i].extra = py::cast<std::string_view>(extras[i]);
  }
  std::vector<Digest> keys;
  if (chunks.size() < kUnlockedMin) {
    keys = attnstore::chain_keys(parent, texts);
  } else {
    const std::string_view first = parent;
    const py::gil_scoped_release release;
    keys = attnstore::chain_keys(first, texts);
  }
  py::list made;
  for (const Digest& key : keys) {
    made.append(py::bytes(reinterpret_cast<const char*>(key.data()), key.size()));
  }
  return made;
}

}  // namespace

void bind_chunk_keys(py::module_& m) {
  m.def("encode_tokens", &encode_tokens, py::arg("token_ids"),
        "The ids of a list as big-endian uint32. Cost: about 3 ns a token.");
  m.def("encode_chunks", &encode_chunks, py::arg("token_ids"), py::arg("chunk_tokens"),
        py::arg("first"), py::arg("stop"),
        "The same of the whole chunks [first, stop) of a list, a bytes object for each.");
  m.def("chain_keys", &chain_keys, py::arg("parent"), py::arg("chunks"), py::arg("extras"),
        "The keys of chunks that follow `parent` and each other, by their encoded tokens and\n"
        "their extras, none of which means that all are empty. Cost: about 2 us a chunk of 256\n"
        "tokens; without the GIL where there are many.");
}
