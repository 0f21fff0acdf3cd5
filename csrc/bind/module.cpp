// SPDX-License-Identifier: Apache-2.0
// The Python module attnstore_vllm._native. It knows addresses and sizes, not PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bind/bind_copies.h"
#include "bind/bindings.h"
#include "bind/shapes.h"
#include "copy/omp_team.h"
#include "copy/page_copier.h"

namespace py = pybind11;

void bind_prefix_index(py::module_& m);   // prefix_index_bindings.cpp
void bind_content_index(py::module_& m);  // bind_content_index.cpp
void bind_chunk_keys(py::module_& m);     // bind_chunk_keys.cpp

namespace {

using attnstore::as_copies;
using attnstore::Copies;

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native data path of attnstore_vllm.";
  attnstore::bind_shapes(m);
  bind_prefix_index(m);
  bind_content_index(m);
  bind_chunk_keys(m);
  py::class_<attnstore::PageCopier>(m, "PageCopier",
                                    "Copies KV pages between HBM and slots. The memory behind the\n"
                                    "addresses outlives it. One thread calls it.")
      .def(py::init<attnstore::PageShape>(), py::arg("pages"))
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
  bind_codec(m);
  bind_encoded(m);
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
