// SPDX-License-Identifier: Apache-2.0
// attnstore_vllm._native.ContentIndex: bytes and numbers for Python. See index/token_search.py.
#include <pybind11/pybind11.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "content/content_index.h"

namespace py = pybind11;

namespace {

using attnstore::Bytes32;
using attnstore::ContentExtent;
using attnstore::ContentIndex;
using attnstore::ContentPiece;
using attnstore::ContentQuery;
using attnstore::kTokenBytes;

Bytes32 as_bytes32(const py::bytes& value) {
  const std::string_view view = value;
  Bytes32 made{};
  if (view.size() != made.size()) throw std::invalid_argument("not 32 bytes");
  std::memcpy(made.data(), view.data(), view.size());
  return made;
}

struct Tokens {
  explicit Tokens(const py::bytes& encoded) {
    const std::string_view view = encoded;
    if (view.size() % kTokenBytes != 0) throw std::invalid_argument("not whole tokens");
    if (view.size() / kTokenBytes > std::numeric_limits<std::uint32_t>::max() / 2) {
      throw std::invalid_argument("too many tokens");
    }
    data = reinterpret_cast<const std::uint8_t*>(view.data());
    count = static_cast<std::uint32_t>(view.size() / kTokenBytes);
  }
  const std::uint8_t* data;
  std::uint32_t count;
};

void add(ContentIndex& self, const py::bytes& key, const py::bytes& parent, const py::bytes& domain,
         const py::bytes& tokens, std::uint32_t native_from, bool is_exact) {
  const Tokens all(tokens);
  self.add({as_bytes32(key), as_bytes32(parent), as_bytes32(domain), all.data, all.count,
            native_from, is_exact});
}

using Search = std::vector<ContentExtent> (ContentIndex::*)(const ContentQuery&);

template <Search search>
py::list find(ContentIndex& self, const py::bytes& domain, const py::bytes& tokens,
              std::uint32_t start, std::uint32_t stop, std::uint32_t min_extent,
              std::size_t max_extents) {
  const Tokens all(tokens);
  if (start > stop || stop > all.count) throw std::invalid_argument("no such tokens");
  py::list cover;
  for (const ContentExtent& extent :
       (self.*search)({as_bytes32(domain), all.data, start, stop, min_extent, max_extents})) {
    py::list pieces;
    for (const ContentPiece& piece : extent.pieces) {
      const Bytes32& key = self.key(piece.id);
      pieces.append(py::make_tuple(py::bytes(reinterpret_cast<const char*>(key.data()), key.size()),
                                   piece.first, piece.start, piece.stop,
                                   py::bytes(self.tokens(piece.id)), self.is_exact(piece.id)));
    }
    cover.append(std::move(pieces));
  }
  return cover;
}

py::tuple work(const ContentIndex& self) {
  const attnstore::ContentWork& done = self.work();
  return py::make_tuple(done.windows, done.candidates, done.walks, done.looks, done.tokens);
}

}  // namespace

void bind_content_index(py::module_& m) {
  py::class_<ContentIndex>(m, "ContentIndex", "Chunks by their content; see index/token_search.py.")
      .def(py::init<std::uint32_t, std::size_t, std::uint64_t>(), py::arg("chunk_tokens"),
           py::arg("max_chunks"), py::arg("seed"))
      .def("__len__", &ContentIndex::size)
      .def("memory_bytes", &ContentIndex::bytes)
      .def("add", &add, py::arg("key"), py::arg("parent"), py::arg("domain"), py::arg("tokens"),
           py::arg("native_from"), py::arg("is_exact"))
      .def(
          "remove",
          [](ContentIndex& self, const py::bytes& key) { return self.remove(as_bytes32(key)); },
          py::arg("key"), "Whether it was there.")
      .def("clear", &ContentIndex::clear)
      .def("find", &find<&ContentIndex::find>, py::arg("domain"), py::arg("tokens"),
           py::arg("start"), py::arg("stop"), py::arg("min_extent"), py::arg("max_extents"),
           "A list of extents, each a list of (key, first, start, stop, tokens of its chunk, "
           "is_exact).")
      .def("find_all", &find<&ContentIndex::find_all>, py::arg("domain"), py::arg("tokens"),
           py::arg("start"), py::arg("stop"), py::arg("min_extent"), py::arg("max_extents"),
           "As find(), with gaps between the extents.")
      .def("work", &work, "Windows, candidates, walks, looks and tokens of the last search.");
}
