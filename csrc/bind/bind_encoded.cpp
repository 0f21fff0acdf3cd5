// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bind_copies.h"
#include "bind/bindings.h"
#include "copy/encoded_copier.h"

namespace py = pybind11;

namespace {

using attnstore::as_copies;
using attnstore::Copies;
using attnstore::EncodedCopier;
using attnstore::PageShape;

}  // namespace

void bind_encoded(py::module_& m) {
  py::class_<EncodedCopier>(m, "EncodedCopier",
                            "Copies KV pages of bfloat16 between HBM and cells of slots, where "
                            "they are encoded.\nThe memory behind the addresses outlives it. One "
                            "thread calls it.")
      .def(py::init<PageShape, std::uint64_t>(), py::arg("pages"), py::arg("cell_bytes"))
      .def(
          "load",
          [](const EncodedCopier& self, const Copies& copies, std::int64_t first_layer,
             std::int64_t stop_layer) {
            const auto all = as_copies(copies);
            const py::gil_scoped_release release;
            self.load(all, {first_layer, stop_layer});
          },
          py::arg("copies"), py::arg("first_layer"), py::arg("stop_layer"),
          "Fill these layers of blocks from slots ([n, 3] int64); complete on return. Raises "
          "RuntimeError where a cell holds no page.")
      .def(
          "save",
          [](const EncodedCopier& self, const Copies& copies, std::int64_t first_layer,
             std::int64_t stop_layer) {
            const auto all = as_copies(copies);
            const py::gil_scoped_release release;
            return self.save(all, {first_layer, stop_layer});
          },
          py::arg("copies"), py::arg("first_layer"), py::arg("stop_layer"),
          "Copy these layers of blocks ([n, 3] int64) into slots; complete on return. Returns the "
          "slots of which a page did not fit.");
}
