// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bind/bind_moved.h"
#include "bind/bindings.h"
#include "rotate/page_rotator.h"

namespace py = pybind11;

namespace {

using attnstore::as_moved;
using attnstore::Moved;
using attnstore::PageRotator;

}  // namespace

void bind_rotator(py::module_& m) {
  py::class_<PageRotator>(
      m, "PageRotator",
      "Copies single tokens from slots into blocks at other positions: K turned\n"
      "by the difference, V as it is. The memory behind the addresses outlives\n"
      "it. One thread calls it.")
      .def(py::init<attnstore::PageShape, attnstore::RotationShape>(), py::arg("pages"),
           py::arg("rotation"))
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
