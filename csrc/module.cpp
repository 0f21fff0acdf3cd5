// SPDX-License-Identifier: Apache-2.0
// The Python module attnstore_vllm._native. It knows addresses and sizes, not PyTorch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <vector>

#include "copy_queue.h"

namespace py = pybind11;

namespace {

using Addresses = py::array_t<std::uint64_t, py::array::c_style>;

std::vector<attnstore::Run> make_runs(const Addresses& targets, const Addresses& sources,
                                      std::size_t num_bytes) {
  if (targets.size() != sources.size()) {
    throw std::invalid_argument("there must be as many targets as sources");
  }
  std::vector<attnstore::Run> runs;
  runs.reserve(static_cast<std::size_t>(targets.size()));
  const std::uint64_t* target = targets.data();
  const std::uint64_t* source = sources.data();
  for (py::ssize_t i = 0; i < targets.size(); ++i) {
    runs.push_back({reinterpret_cast<const std::byte*>(source[i]),
                    reinterpret_cast<std::byte*>(target[i]), num_bytes});
  }
  return runs;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native data path of attnstore_vllm.";
  py::class_<attnstore::CopyQueue>(m, "CopyQueue",
                                   "Copies runs of bytes, in order, beside the caller.")
      .def(py::init<int>(), py::arg("num_threads"))
      .def(
          "submit",
          [](attnstore::CopyQueue& queue, const Addresses& targets, const Addresses& sources,
             std::size_t num_bytes) {
            auto runs = make_runs(targets, sources, num_bytes);
            const py::gil_scoped_release release;
            return queue.submit(std::move(runs));
          },
          py::arg("targets"), py::arg("sources"), py::arg("num_bytes"),
          "Queue copies of num_bytes from sources[i] to targets[i] (uint64 addresses that stay\n"
          "valid until wait() has returned); returns their ticket.")
      .def("wait", &attnstore::CopyQueue::wait, py::arg("ticket"),
           py::call_guard<py::gil_scoped_release>(),
           "Return when that batch is copied, helping meanwhile. A ticket is waited for once.");
}
