// SPDX-License-Identifier: Apache-2.0
// Tokens and keys for Python: see index/keys.py.
#include <pybind11/pybind11.h>

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

constexpr std::size_t kTokenBytes = 4;
// Fewer are hashed before another thread could give the lock back: it keeps it for 5 ms.
constexpr std::size_t kUnlockedMin = 256;

// The ids [start, stop) of a list, each modulo 2^32: one that is no token must not raise.
void encode(const py::list& ids, std::size_t start, std::size_t stop, char* to) {
  for (std::size_t at = start; at < stop; ++at, to += kTokenBytes) {
    PyObject* const id = PyList_GET_ITEM(ids.ptr(), static_cast<Py_ssize_t>(at));
    // Of an int no code of Python's is run that could change the list.
    if (!PyLong_Check(id)) throw py::type_error("a token id is no int");
    const auto encoded =
        __builtin_bswap32(static_cast<std::uint32_t>(PyLong_AsUnsignedLongLongMask(id)));
    std::memcpy(to, &encoded, kTokenBytes);
  }
}

py::bytes encode_tokens(const py::list& ids) {
  const std::size_t count = ids.size();
  auto made = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kTokenBytes)));
  if (!made) throw py::error_already_set();
  encode(ids, 0, count, PyBytes_AS_STRING(made.ptr()));
  return made;
}

py::list encode_chunks(const py::list& ids, std::size_t chunk_tokens) {
  const std::size_t count = ids.size();
  if (chunk_tokens == 0 || count % chunk_tokens != 0) {
    throw std::invalid_argument("not whole chunks");
  }
  py::list chunks;
  for (std::size_t at = 0; at < count; at += chunk_tokens) {
    auto chunk = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(chunk_tokens * kTokenBytes)));
    if (!chunk) throw py::error_already_set();
    encode(ids, at, at + chunk_tokens, PyBytes_AS_STRING(chunk.ptr()));
    chunks.append(std::move(chunk));
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
        "The same, a bytes object for each chunk of a list of whole chunks.");
  m.def("chain_keys", &chain_keys, py::arg("parent"), py::arg("chunks"), py::arg("extras"),
        "The keys of chunks that follow `parent` and each other, by their encoded tokens and\n"
        "their extras, none of which means that all are empty. Cost: about 2 us a chunk of 256\n"
        "tokens; without the GIL where there are many.");
}
