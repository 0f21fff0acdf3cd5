// SPDX-License-Identifier: Apache-2.0
// The Python module attnstore_vllm._native. It knows addresses and sizes, not PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bind_copies.h"
#include "bindings.h"
#include "omp_team.h"
#include "page_copier.h"

namespace py = pybind11;

void bind_prefix_index(py::module_& m);   // prefix_index_bindings.cpp
void bind_content_index(py::module_& m);  // bind_content_index.cpp

namespace {

using attnstore::as_copies;
using attnstore::Copies;

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native data path of attnstore_vllm.";
  bind_prefix_index(m);
  bind_content_index(m);
  py::class_<attnstore::PageCopier>(m, "PageCopier",
                                    "Copies KV pages between HBM and slots. The memory behind the\n"
                                    "addresses outlives it. One thread calls it.")
      .def(py::init([](std::uint64_t slots_base, std::int64_t num_slots, std::uint64_t slot_bytes,
                       std::uint64_t layer_bytes, std::uint64_t page_bytes,
                       std::vector<std::uint64_t> layer_bases, std::int64_t num_blocks,
                       std::uint64_t block_stride, std::vector<std::uint64_t> run_offsets,
                       std::uint64_t run_bytes) {
             return std::make_unique<attnstore::PageCopier>(attnstore::PageShape{
                 slots_base, num_slots, slot_bytes, layer_bytes, page_bytes, std::move(layer_bases),
                 num_blocks, block_stride, std::move(run_offsets), run_bytes});
           }),
           py::kw_only(), py::arg("slots_base"), py::arg("num_slots"), py::arg("slot_bytes"),
           py::arg("layer_bytes"), py::arg("page_bytes"), py::arg("layer_bases"),
           py::arg("num_blocks"), py::arg("block_stride"), py::arg("run_offsets"),
           py::arg("run_bytes"))
      .def(
          "load",
          [](const attnstore::PageCopier& self, const Copies& copies, std::int64_t first_layer,
             std::int64_t stop_layer) {
            auto all = as_copies(copies);
            const py::gil_scoped_release release;
            self.load(all, {first_layer, stop_layer});
          },
          py::arg("copies"), py::arg("first_layer"), py::arg("stop_layer"),
          "Fill these layers of blocks from slots ([n, 3] int64); complete on return.")
      .def(
          "save",
          [](const attnstore::PageCopier& self, const Copies& copies, std::int64_t first_layer,
             std::int64_t stop_layer) {
            auto all = as_copies(copies);
            const py::gil_scoped_release release;
            self.save(all, {first_layer, stop_layer});
          },
          py::arg("copies"), py::arg("first_layer"), py::arg("stop_layer"),
          "Copy these layers of blocks ([n, 3] int64) into slots; complete on return.");
  bind_rotator(m);
  m.def("omp_team_size", &attnstore::omp_team_size, py::call_guard<py::gil_scoped_release>(),
        "Threads that PageCopier's copies run on, if the calling thread calls it.");
#if defined(ATTNSTORE_HAS_XXHASH)
  bind_checksum(m);
#endif
#if defined(ATTNSTORE_HAS_URING)
  bind_uring(m);
  m.attr("has_uring") = true;
#else
  m.attr("has_uring") = false;
#endif
}
