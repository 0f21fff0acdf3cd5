// SPDX-License-Identifier: Apache-2.0
// The Python module attnstore_vllm._native_cuda. It knows addresses, sizes and CUDA's own handles,
// not PyTorch. Importing it needs neither a GPU nor its driver.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind_copies.h"
#include "bind/bind_moved.h"
#include "bind/shapes.h"
#include "cuda/cuda_copier.h"
#include "cuda/cuda_rotator.h"
#include "cuda/kernels.h"
#include "cuda/on_device.h"

namespace py = pybind11;

namespace {

using attnstore::as_copies;
using attnstore::as_moved;
using attnstore::as_rows;
using attnstore::check_cuda;
using attnstore::Copies;
using attnstore::Copy;
using attnstore::CudaPageCopier;
using attnstore::CudaPageRotator;
using attnstore::driver;
using attnstore::InContext;
using attnstore::Kernels;
using attnstore::Moved;
using attnstore::MoveTable;
using attnstore::PageBatch;
using attnstore::PageShape;
using attnstore::PageTable;
using attnstore::ReadSpans;
using attnstore::RotationShape;
using attnstore::Rows;

attnstore::CuStream as_stream(std::uint64_t handle) {
  return reinterpret_cast<attnstore::CuStream>(handle);
}

// Page-locks memory; returns its address as the device sees it.
std::uint64_t register_host(std::uint64_t address, std::size_t num_bytes, int device) {
  const InContext in_context(attnstore::primary_context(device));
  auto* const memory = reinterpret_cast<void*>(address);
  check_cuda(driver().memHostRegister(
                 memory, num_bytes, attnstore::kCuRegisterMapped | attnstore::kCuRegisterPortable),
             "cuMemHostRegister");
  attnstore::CuAddress seen = 0;
  const attnstore::CuResult result = driver().memHostGetDevicePointer(&seen, memory, 0);
  if (result != attnstore::kCuSuccess) static_cast<void>(driver().memHostUnregister(memory));
  check_cuda(result, "cuMemHostGetDevicePointer");
  return seen;
}

void unregister_host(std::uint64_t address, int device) {
  const InContext in_context(attnstore::primary_context(device));
  check_cuda(driver().memHostUnregister(reinterpret_cast<void*>(address)), "cuMemHostUnregister");
}

int driver_version() {
  int version = 0;
  check_cuda(driver().driverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

std::pair<int, int> capability(int device) {
  attnstore::CuDevice handle = 0;
  std::pair<int, int> found;
  check_cuda(driver().deviceGet(&handle, device), "cuDeviceGet");
  check_cuda(driver().deviceGetAttribute(&found.first, attnstore::kCuCapabilityMajor, handle),
             "cuDeviceGetAttribute");
  check_cuda(driver().deviceGetAttribute(&found.second, attnstore::kCuCapabilityMinor, handle),
             "cuDeviceGetAttribute");
  return found;
}

void bind_driver(py::module_& m) {
  py::class_<Kernels, std::shared_ptr<Kernels>>(m, "Kernels", "The kernels, loaded on one device.")
      .def(py::init([](int device, const std::vector<py::bytes>& images) {
             std::vector<std::string> all;
             for (const py::bytes& image : images) all.emplace_back(image);
             const py::gil_scoped_release release;
             return std::make_shared<Kernels>(device, all);
           }),
           py::arg("device"), py::arg("images"))
      .def_property_readonly("image", &Kernels::image);
  m.def("why_no_driver", &attnstore::why_no_driver,
        "Why NVIDIA's driver cannot be used on this machine; \"\" if it can.");
  m.def("driver_version", &driver_version,
        "The CUDA version that the driver is of: 12040 is 12.4.");
  m.def("capability", &capability, py::arg("device"),
        "The device's compute capability: (9, 0) is sm_90.");
  m.def("register_host", &register_host, py::arg("address"), py::arg("num_bytes"),
        py::arg("device"), py::call_guard<py::gil_scoped_release>(),
        "Page-lock memory of this process; returns its address as the device sees it.");
  m.def("unregister_host", &unregister_host, py::arg("address"), py::arg("device"),
        py::call_guard<py::gil_scoped_release>());
}

void bind_copier(py::module_& m) {
  py::enum_<Copy>(m, "Copy")
      .value("LOAD", Copy::kLoad)
      .value("SAVE", Copy::kSave)
      .value("GATHER", Copy::kGather)
      .value("DRAIN", Copy::kDrain)
      .value("FILL", Copy::kFill)
      .value("SCATTER", Copy::kScatter);
  py::class_<ReadSpans>(m, "ReadSpans", "The read buffer: spans of one size, which take pages.")
      .def(py::init([](std::uint64_t base, std::uint64_t span_bytes, std::int64_t num_spans) {
             return ReadSpans{base, span_bytes, num_spans};
           }),
           py::arg("base") = 0, py::arg("span_bytes") = 0, py::arg("num_spans") = 0);
  py::class_<PageBatch>(m, "PageBatch", "Pages that are copied together, in some layers at a time.")
      .def_property_readonly(
          "words",
          [](const PageBatch& self) {
            const auto* const words = reinterpret_cast<const std::int64_t*>(self.pages.data());
            return py::array_t<std::int64_t>(static_cast<py::ssize_t>(2 * self.pages.size()),
                                             words);
          },
          "What has to lie, 16 bytes aligned, where the kernel reads it; a copy.")
      .def_property_readonly(
          "num_runs", [](const PageBatch& self) { return self.runs.size(); },
          "Contiguous runs in a layer, neighbours counted as one.");
  py::class_<CudaPageCopier>(
      m, "PageCopier",
      "Appends copies of KV pages to streams. The memory behind the addresses\n"
      "outlives them. One thread calls it.")
      .def(py::init([](PageShape pages, ReadSpans spans, std::shared_ptr<Kernels> kernels,
                       std::uint64_t arrays, std::uint64_t cell_bytes) {
             const py::gil_scoped_release release;
             return std::make_unique<CudaPageCopier>(std::move(kernels), std::move(pages), spans,
                                                     arrays, cell_bytes);
           }),
           py::arg("pages"), py::arg("spans") = ReadSpans{}, py::kw_only(), py::arg("kernels"),
           py::arg("arrays"), py::arg("cell_bytes") = 0)
      .def(
          "prepare",
          [](const CudaPageCopier& self, Copy copy, const Copies& copies, const Rows& rows) {
            const PageTable table{as_copies(copies), as_rows(rows)};
            const py::gil_scoped_release release;
            return std::make_unique<PageBatch>(self.prepare(copy, table));
          },
          py::arg("copy"), py::arg("copies"), py::arg("rows"),
          "Pages ([n, 3] int64) and rows ([n], or none where none take part) for copies of one\n"
          "kind. IndexError if one of them does not exist.")
      .def(
          "by_kernel",
          [](const CudaPageCopier& self, const PageBatch& batch, std::int64_t first_layer,
             std::int64_t stop_layer, std::uint64_t table_device, std::uint64_t table_host,
             std::uint32_t thread_blocks, std::uint64_t stream, std::uint64_t failed) {
            const py::gil_scoped_release release;
            self.by_kernel(batch, {first_layer, stop_layer}, {table_device, table_host},
                           thread_blocks, as_stream(stream), failed);
          },
          py::arg("batch"), py::arg("first_layer"), py::arg("stop_layer"), py::arg("table_device"),
          py::arg("table_host"), py::arg("thread_blocks"), py::arg("stream"), py::arg("failed") = 0,
          "Copy by the kernel, which reads its table at `table_device`; it is brought there from\n"
          "page-locked memory at `table_host` unless that is 0. The word at `failed` gets 1 when "
          "a\n"
          "cell holds no page, or a page does not fit in its cell.")
      .def(
          "by_dma",
          [](const CudaPageCopier& self, PageBatch& batch, std::int64_t first_layer,
             std::int64_t stop_layer, bool reads_early, std::uint64_t stream) {
            const py::gil_scoped_release release;
            self.by_dma(&batch, {first_layer, stop_layer}, reads_early, as_stream(stream));
          },
          py::arg("batch"), py::arg("first_layer"), py::arg("stop_layer"), py::arg("reads_early"),
          py::arg("stream"),
          "Copy by the copy engines. The slots of a load may be read from now on if it says so.")
      .def(
          "bring",
          [](const CudaPageCopier& self, const PageBatch& batch, std::uint64_t table_device,
             std::uint64_t table_host, std::uint64_t stream) {
            const py::gil_scoped_release release;
            self.bring(batch, {table_device, table_host}, as_stream(stream));
          },
          py::arg("batch"), py::arg("table_device"), py::arg("table_host"), py::arg("stream"),
          "Bring the table of a batch to `table_device`, unless `table_host` is 0.")
      .def(
          "fill",
          [](const CudaPageCopier& self, PageBatch& batch, std::int64_t layer, std::int64_t span,
             bool reads_early, std::uint64_t stream) {
            const py::gil_scoped_release release;
            self.fill(&batch, layer, span, reads_early, as_stream(stream));
          },
          py::arg("batch"), py::arg("layer"), py::arg("span"), py::arg("reads_early"),
          py::arg("stream"), "Copy a layer of a batch of FILL into a span, by the copy engines.")
      .def(
          "scatter",
          [](const CudaPageCopier& self, const PageBatch& batch, std::int64_t layer,
             std::int64_t first, std::int64_t count, std::int64_t span, std::uint64_t table_device,
             std::uint32_t thread_blocks, std::uint64_t stream, std::uint64_t failed) {
            const py::gil_scoped_release release;
            self.scatter(batch, layer, first, count, span, {table_device, 0}, thread_blocks,
                         as_stream(stream), failed);
          },
          py::arg("batch"), py::arg("layer"), py::arg("first"), py::arg("count"), py::arg("span"),
          py::arg("table_device"), py::arg("thread_blocks"), py::arg("stream"),
          py::arg("failed") = 0,
          "Copy a layer of so many pages of a batch of SCATTER out of a span, by the kernel, "
          "which\n"
          "reads the whole batch's table at `table_device`.")
      .def_static(
          "arrays_of",
          [](const PageShape& pages, const ReadSpans& spans, std::uint64_t cell_bytes) {
            const auto all = CudaPageCopier::arrays_of(pages, spans, cell_bytes);
            const auto* const words = reinterpret_cast<const std::int64_t*>(all.data());
            return std::vector<std::int64_t>(words, words + 2 * all.size());
          },
          py::arg("pages"), py::arg("spans") = ReadSpans{}, py::arg("cell_bytes") = 0,
          "What has to lie, 16 bytes aligned, at `arrays` on the device.")
      .def_property_readonly("span_pages", &CudaPageCopier::span_pages)
      .def_property_readonly("page_bytes", &CudaPageCopier::page_bytes)
      .def_property_readonly("is_encoded", &CudaPageCopier::is_encoded);
}

void bind_rotator(py::module_& m) {
  py::class_<MoveTable>(m, "MoveTable",
                        "Tokens that go to other positions, as the kernel reads them.")
      .def_property_readonly(
          "words",
          [](const MoveTable& self) {
            return py::array_t<std::int64_t>(static_cast<py::ssize_t>(self.words.size()),
                                             self.words.data());
          },
          "What has to lie, 16 bytes aligned, where the kernel reads it; a copy.")
      .def_readonly("num_tokens", &MoveTable::num_tokens);
  py::class_<CudaPageRotator>(
      m, "PageRotator",
      "Appends loads of single tokens, K turned to their new positions, to\n"
      "streams. The memory behind the addresses outlives them. One thread\n"
      "calls it.")
      .def(py::init([](PageShape pages, RotationShape rotation, std::shared_ptr<Kernels> kernels,
                       std::uint64_t arrays) {
             const py::gil_scoped_release release;
             return std::make_unique<CudaPageRotator>(std::move(kernels), std::move(pages),
                                                      std::move(rotation), arrays);
           }),
           py::arg("pages"), py::arg("rotation"), py::kw_only(), py::arg("kernels"),
           py::arg("arrays"))
      .def(
          "check",
          [](const CudaPageRotator& self, const Moved& moved, std::int64_t first_layer,
             std::int64_t stop_layer) {
            auto all = as_moved(moved);
            const py::gil_scoped_release release;
            self.check(std::move(all), {first_layer, stop_layer});
          },
          py::arg("moved"), py::arg("first_layer"), py::arg("stop_layer"))
      .def(
          "table",
          [](const CudaPageRotator& self, const Moved& moved) {
            const auto all = as_moved(moved);
            const py::gil_scoped_release release;
            return self.table(all);
          },
          py::arg("moved"), "The table of these tokens ([n, 6] int64).")
      .def(
          "load",
          [](const CudaPageRotator& self, const MoveTable& table, std::int64_t first_layer,
             std::int64_t stop_layer, std::uint64_t table_device, std::uint64_t table_host,
             std::uint32_t thread_blocks, std::uint64_t stream) {
            const py::gil_scoped_release release;
            self.load(table, {first_layer, stop_layer}, {table_device, table_host}, thread_blocks,
                      as_stream(stream));
          },
          py::arg("table"), py::arg("first_layer"), py::arg("stop_layer"), py::arg("table_device"),
          py::arg("table_host"), py::arg("thread_blocks"), py::arg("stream"),
          "Fill the places of a table, whose words the kernel reads at `table_device`; they are\n"
          "brought there from page-locked memory at `table_host` unless that is 0.")
      .def_property_readonly("is_wide", &CudaPageRotator::is_wide);
}

}  // namespace

PYBIND11_MODULE(_native_cuda, m) {
  m.doc() = "CUDA half of the native data path of attnstore_vllm.";
  attnstore::bind_shapes(m);
  bind_driver(m);
  bind_copier(m);
  bind_rotator(m);
}
