// SPDX-License-Identifier: Apache-2.0
// The Python module attnstore_vllm._native. It knows addresses and sizes, not PyTorch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "omp_team.h"
#include "page_copier.h"

namespace py = pybind11;

void bind_prefix_index(py::module_& m);  // prefix_index_bindings.cpp

namespace {

using Copies = py::array_t<std::int64_t, py::array::c_style>;

std::vector<attnstore::PageCopy> as_copies(const Copies& array) {
  if (array.ndim() != 2 || array.shape(1) != 3) {
    throw std::invalid_argument("copies must be [n, 3]: slot, block in the chunk, block id");
  }
  std::vector<attnstore::PageCopy> copies;
  copies.reserve(static_cast<std::size_t>(array.shape(0)));
  const std::int64_t* at = array.data();
  for (py::ssize_t i = 0; i < array.shape(0); ++i, at += 3) copies.push_back({at[0], at[1], at[2]});
  return copies;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native data path of attnstore_vllm.";
  bind_prefix_index(m);
  py::class_<attnstore::PageCopier>(m, "PageCopier",
                                    "Copies KV pages between HBM and slots. The memory behind the\n"
                                    "addresses outlives it. One thread calls it.")
      .def(py::init([](std::uint64_t slots_base, std::int64_t num_slots, std::uint64_t slot_bytes,
                       std::uint64_t layer_bytes, std::uint64_t page_bytes,
                       std::vector<std::uint64_t> layer_bases, std::int64_t num_blocks,
                       std::uint64_t block_stride, std::vector<std::uint64_t> run_offsets,
                       std::uint64_t run_bytes) {
             return std::make_unique<attnstore::PageCopier>(attnstore::PageMap{
                 slots_base, num_slots, slot_bytes, layer_bytes, page_bytes, std::move(layer_bases),
                 num_blocks, block_stride, std::move(run_offsets), run_bytes});
           }),
           py::kw_only(), py::arg("slots_base"), py::arg("num_slots"), py::arg("slot_bytes"),
           py::arg("layer_bytes"), py::arg("page_bytes"), py::arg("layer_bases"),
           py::arg("num_blocks"), py::arg("block_stride"), py::arg("run_offsets"),
           py::arg("run_bytes"))
      .def(
          "load",
          [](const attnstore::PageCopier& self, const Copies& copies) {
            const auto all = as_copies(copies);
            const py::gil_scoped_release release;
            self.load(all);
          },
          py::arg("copies"), "Fill blocks from slots ([n, 3] int64); complete on return.")
      .def(
          "save",
          [](const attnstore::PageCopier& self, const Copies& copies) {
            const auto all = as_copies(copies);
            const py::gil_scoped_release release;
            self.save(all);
          },
          py::arg("copies"), "Copy blocks ([n, 3] int64) into slots; complete on return.");
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
