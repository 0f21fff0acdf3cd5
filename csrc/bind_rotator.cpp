// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind_moved.h"
#include "bindings.h"
#include "page_rotator.h"

namespace py = pybind11;

namespace {

using attnstore::as_moved;
using attnstore::as_side;
using attnstore::as_type;
using attnstore::Moved;
using attnstore::PageRotator;
using attnstore::Pairing;
using attnstore::Side;

}  // namespace

void bind_rotator(py::module_& m) {
  py::class_<PageRotator>(
      m, "PageRotator",
      "Copies single tokens from slots into blocks at other positions: K turned\n"
      "by the difference, V as it is. The memory behind the addresses outlives\n"
      "it. One thread calls it.")
      .def(py::init([](std::uint64_t slots_base, std::int64_t num_slots, std::uint64_t slot_bytes,
                       std::uint64_t layer_bytes, std::uint64_t page_bytes,
                       std::vector<std::uint64_t> layer_bases, std::int64_t num_blocks,
                       std::uint64_t block_stride, std::vector<std::uint64_t> run_offsets,
                       std::uint64_t run_bytes, const Side& key, const Side& value,
                       std::int64_t num_heads, std::int64_t head_dim, std::int64_t block_tokens,
                       const std::string& dtype, bool is_neox, std::vector<double> theta) {
             return std::make_unique<PageRotator>(
                 attnstore::PageShape{slots_base, num_slots, slot_bytes, layer_bytes, page_bytes,
                                      std::move(layer_bases), num_blocks, block_stride,
                                      std::move(run_offsets), run_bytes},
                 attnstore::RotationShape{{as_side(key), as_side(value)},
                                          num_heads,
                                          head_dim,
                                          block_tokens,
                                          as_type(dtype),
                                          is_neox ? Pairing::kNeox : Pairing::kGptj,
                                          std::move(theta)});
           }),
           py::kw_only(), py::arg("slots_base"), py::arg("num_slots"), py::arg("slot_bytes"),
           py::arg("layer_bytes"), py::arg("page_bytes"), py::arg("layer_bases"),
           py::arg("num_blocks"), py::arg("block_stride"), py::arg("run_offsets"),
           py::arg("run_bytes"), py::arg("key"), py::arg("value"), py::arg("num_heads"),
           py::arg("head_dim"), py::arg("block_tokens"), py::arg("dtype"), py::arg("is_neox"),
           py::arg("theta"))
      .def(
          "load",
          [](const PageRotator& self, const Moved& moved, std::int64_t first_layer,
             std::int64_t stop_layer) {
            auto all = as_moved(moved);
            const py::gil_scoped_release release;
            self.load(std::move(all), {first_layer, stop_layer});
          },
          py::arg("moved"), py::arg("first_layer"), py::arg("stop_layer"),
          "Fill the places of these tokens ([n, 6] int64) in these layers; complete on return.");
}
