// SPDX-License-Identifier: Apache-2.0
// attnstore_vllm._native.PrefixIndex: bytes and numbers for Python. See index/prefix.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "index/prefix_index.h"
#include "index/record_header.h"

namespace py = pybind11;

namespace {

using attnstore::Bytes32;
using attnstore::Entry;
using attnstore::Id;
using attnstore::kTokenBytes;
using attnstore::PrefixIndex;
using Slots = py::array_t<std::uint32_t, py::array::c_style>;

// 32 bytes, or none, which are all zero.
Bytes32 as_bytes32(const py::bytes& value) {
  const std::string_view view = value;
  Bytes32 made{};
  if (!view.empty() && view.size() != made.size()) throw std::invalid_argument("not 32 bytes");
  std::memcpy(made.data(), view.data(), view.size());
  return made;
}

template <std::size_t size>
py::bytes as_py(const std::array<std::uint8_t, size>& value) {
  return {reinterpret_cast<const char*>(value.data()), size};
}

struct Tokens {
  explicit Tokens(const py::bytes& encoded) {
    const std::string_view view = encoded;
    data = reinterpret_cast<const std::uint8_t*>(view.data());
    count = static_cast<std::uint32_t>(view.size() / kTokenBytes);
  }
  const std::uint8_t* data;
  std::uint32_t count;
};

template <typename T>
py::array_t<T> as_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple record(PrefixIndex& self, Id id) {
  Entry& entry = self.at(id);
  entry.touched = true;
  const py::bytes extra = entry.extra == 0 ? py::bytes() : as_py(self.extra(entry));
  return py::make_tuple(
      as_py(entry.key), as_py(entry.parent), extra, as_py(self.tenant(entry)), entry.position,
      entry.num_tokens, entry.is_alone, entry.slot,
      py::bytes(reinterpret_cast<const char*>(entry.checksum.data()), entry.checksum.size()));
}

py::tuple adopt(PrefixIndex& self, const py::buffer& headers, const Slots& slots,
                std::size_t header_bytes) {
  const py::buffer_info info = headers.request();
  const auto count = static_cast<std::size_t>(slots.size());
  if (static_cast<std::size_t>(info.size * info.itemsize) < count * header_bytes) {
    throw std::invalid_argument("fewer headers than slots");
  }
  const auto done =
      self.adopt(static_cast<const std::uint8_t*>(info.ptr), count, header_bytes, slots.data());
  return py::make_tuple(as_array(done.bound_slots), as_array(done.bound_ids),
                        as_array(done.freed_slots), done.num_entered, done.num_left_out,
                        done.num_superseded);
}

void bind(PrefixIndex& self, Id id, std::int32_t slot, const py::bytes& checksum) {
  const std::string_view view = checksum;
  Entry& entry = self.at(id);
  if (view.size() != entry.checksum.size()) throw std::invalid_argument("not 16 bytes");
  entry.slot = slot;
  std::memcpy(entry.checksum.data(), view.data(), view.size());
}

}  // namespace

void bind_prefix_index(py::module_& m) {
  namespace at = attnstore::record;
  py::dict offsets;
  offsets["num_tokens"] = at::kNumTokensAt;
  offsets["sequence"] = at::kSequenceAt;
  offsets["payload_checksum"] = at::kChecksumAt;
  offsets["key"] = at::kKeyAt;
  offsets["parent"] = at::kParentAt;
  offsets["extra"] = at::kExtraAt;
  offsets["tenant"] = at::kTenantAt;
  offsets["position"] = at::kPositionAt;
  offsets["tokens"] = at::kTokensAt;
  offsets["flags"] = -static_cast<int>(at::kFlagsBeforeEnd);
  m.attr("record_offsets") = offsets;
  py::class_<PrefixIndex>(m, "PrefixIndex", "Names of chunks by entry id; see index/prefix.py.")
      .def(py::init<std::uint32_t, std::uint64_t, std::size_t, std::uint32_t>(),
           py::arg("chunk_tokens"), py::arg("seed"), py::arg("expected"), py::arg("grain"))
      .def("__len__", &PrefixIndex::size)
      .def_property_readonly("piece_tokens",
                             [](const PrefixIndex& self) { return self.sketcher().piece_tokens(); })
      .def(
          "find",
          [](const PrefixIndex& self, const py::bytes& key) -> std::int64_t {
            const Id id = self.find(as_bytes32(key));
            return id == attnstore::kNone ? -1 : static_cast<std::int64_t>(id);
          },
          py::arg("key"), "The entry's id, or -1.")
      .def(
          "find_run",
          [](const PrefixIndex& self, const std::vector<py::bytes>& keys) {
            std::vector<Id> found;
            for (const py::bytes& key : keys) {
              const Id id = self.find(as_bytes32(key));
              if (id == attnstore::kNone) break;
              found.push_back(id);
            }
            return found;
          },
          py::arg("keys"), "The ids of the leading keys that are known.")
      .def("ids", [](const PrefixIndex& self) { return as_array(self.ids()); })
      .def(
          "record", &record, py::arg("id"),
          "Key, parent, extra, tenant, position, number of tokens, whether it is alone, NVMe slot, "
          "checksum.")
      .def(
          "add",
          [](PrefixIndex& self, const py::bytes& key, const py::bytes& parent,
             const py::bytes& extra, const py::bytes& tenant, std::uint32_t position,
             const py::bytes& tokens, bool is_alone) {
            const Tokens all(tokens);
            return self.add({as_bytes32(key), as_bytes32(parent), as_bytes32(extra),
                             as_bytes32(tenant), position, all.count, all.data, is_alone});
          },
          py::arg("key"), py::arg("parent"), py::arg("extra"), py::arg("tenant"),
          py::arg("position"), py::arg("tokens"), py::arg("is_alone"))
      .def("remove", &PrefixIndex::remove, py::arg("id"))
      .def("clear", &PrefixIndex::clear)
      .def("bind", &bind, py::arg("id"), py::arg("slot"), py::arg("checksum"))
      .def(
          "unbind", [](PrefixIndex& self, Id id) { self.at(id).slot = -1; }, py::arg("id"))
      .def(
          "sequences",
          [](const PrefixIndex& self, const Slots& ids) {
            std::vector<std::uint64_t> found;
            for (py::ssize_t i = 0; i < ids.size(); ++i) found.push_back(self.sequence(ids.at(i)));
            return as_array(found);
          },
          py::arg("ids"),
          "The record numbers by which recovery found these entries; 0 of one that is gone.")
      .def(
          "heads_of",
          [](const PrefixIndex& self, const py::bytes& parent, const py::bytes& extra,
             const py::bytes& tokens, std::size_t look_max) {
            const Tokens all(tokens);
            return self.heads_of(as_bytes32(parent), as_bytes32(extra), all.data, all.count,
                                 look_max);
          },
          py::arg("parent"), py::arg("extra"), py::arg("tokens"), py::arg("look_max"),
          "Children whose whole blocks, by their hashes, begin `tokens`.")
      .def(
          "around",
          [](const PrefixIndex& self, const py::bytes& parent, const py::bytes& extra,
             const py::bytes& tokens, std::size_t count_max) {
            const Tokens all(tokens);
            std::vector<std::pair<Id, std::uint32_t>> found;
            for (const auto& [id, pieces] : self.around(as_bytes32(parent), as_bytes32(extra),
                                                        all.data, all.count, count_max)) {
              found.emplace_back(id, pieces);
            }
            return found;
          },
          py::arg("parent"), py::arg("extra"), py::arg("tokens"), py::arg("count_max"),
          "(id, shared leading pieces) of the children beside the place of `tokens`.")
      .def("adopt", &adopt, py::arg("headers"), py::arg("slots"), py::arg("header_bytes"),
           "Bound slots, their ids, freed slots; numbers entered, left out and superseded.");
}
