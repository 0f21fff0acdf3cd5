// SPDX-License-Identifier: Apache-2.0
// The shapes of pages and of their content, as Python makes them. Each module binds its own, since
// either works without the other.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "copy/page_runs.h"
#include "rotate/moved_tokens.h"

namespace attnstore {

using Side = std::array<std::int64_t, 8>;

inline ContentSide as_side(const Side& numbers) {
  return {numbers[0], numbers[1], numbers[2], numbers[3],
          numbers[4], numbers[5], numbers[6], numbers[7]};
}

inline ElementType as_type(const std::string& name) {
  if (name == "bfloat16") return ElementType::kBfloat16;
  if (name == "float16") return ElementType::kFloat16;
  if (name == "float32") return ElementType::kFloat32;
  throw std::invalid_argument("K of type " + name + " cannot be rotated");
}

inline void bind_shapes(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<PageShape>(m, "PageShape", py::module_local(),
                        "Where pages are in slots, in blocks and in rows of a write buffer.")
      .def(py::init([](std::uint64_t slots_base, std::int64_t num_slots, std::uint64_t slot_bytes,
                       std::uint64_t layer_bytes, std::uint64_t page_bytes,
                       std::vector<std::uint64_t> layer_bases, std::int64_t num_blocks,
                       std::uint64_t block_stride, std::vector<std::uint64_t> run_offsets,
                       std::uint64_t run_bytes, std::uint64_t rows_base, std::int64_t num_rows) {
             return PageShape{slots_base,  num_slots,    slot_bytes,
                              layer_bytes, page_bytes,   std::move(layer_bases),
                              num_blocks,  block_stride, std::move(run_offsets),
                              run_bytes,   rows_base,    num_rows};
           }),
           py::kw_only(), py::arg("slots_base"), py::arg("num_slots"), py::arg("slot_bytes"),
           py::arg("layer_bytes"), py::arg("page_bytes"), py::arg("layer_bases"),
           py::arg("num_blocks"), py::arg("block_stride"), py::arg("run_offsets"),
           py::arg("run_bytes"), py::arg("rows_base") = 0, py::arg("num_rows") = 0);
  py::class_<RotationShape>(m, "RotationShape", py::module_local(),
                            "Where K and V are in a page, and how K turns.")
      .def(py::init([](const Side& key, const Side& value, std::int64_t num_heads,
                       std::int64_t head_dim, std::int64_t block_tokens, const std::string& dtype,
                       bool is_neox, std::vector<double> theta) {
             return RotationShape{{as_side(key), as_side(value)},
                                  num_heads,
                                  head_dim,
                                  block_tokens,
                                  as_type(dtype),
                                  is_neox ? Pairing::kNeox : Pairing::kGptj,
                                  std::move(theta)};
           }),
           py::kw_only(), py::arg("key"), py::arg("value"), py::arg("num_heads"),
           py::arg("head_dim"), py::arg("block_tokens"), py::arg("dtype"), py::arg("is_neox"),
           py::arg("theta"));
}

}  // namespace attnstore
