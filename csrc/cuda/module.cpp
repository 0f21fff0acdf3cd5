// SPDX-License-Identifier: Apache-2.0
// The Python module attnstore_vllm._native_cuda. It knows addresses, sizes and CUDA's own handles,
// not PyTorch. Importing it needs no GPU.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../bind_copies.h"
#include "../bind_moved.h"
#include "cuda_error.h"
#include "page_mover.h"
#include "page_turner.h"

namespace py = pybind11;

namespace {

using attnstore::as_copies;
using attnstore::as_moved;
using attnstore::as_rows;
using attnstore::as_side;
using attnstore::as_type;
using attnstore::check_cuda;
using attnstore::Copies;
using attnstore::Move;
using attnstore::Moved;
using attnstore::MoveTable;
using attnstore::PageMover;
using attnstore::PageShape;
using attnstore::PageTable;
using attnstore::PageTurner;
using attnstore::Pairing;
using attnstore::RotationShape;
using attnstore::Rows;
using attnstore::Side;

cudaStream_t as_stream(std::uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// Page-locks memory; returns its address as the device sees it.
std::uint64_t register_host(std::uint64_t address, std::size_t num_bytes) {
  auto* const memory = reinterpret_cast<void*>(address);
  check_cuda(cudaHostRegister(memory, num_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
             "cudaHostRegister");
  void* seen = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&seen, memory, 0);
  if (status != cudaSuccess) static_cast<void>(cudaHostUnregister(memory));
  check_cuda(status, "cudaHostGetDevicePointer");
  return reinterpret_cast<std::uint64_t>(seen);
}

void unregister_host(std::uint64_t address) {
  check_cuda(cudaHostUnregister(reinterpret_cast<void*>(address)), "cudaHostUnregister");
}

void bind_page_mover(py::module_& m) {
  py::enum_<Move>(m, "Move")
      .value("LOAD", Move::kLoad)
      .value("SAVE", Move::kSave)
      .value("GATHER", Move::kGather)
      .value("DRAIN", Move::kDrain);
  py::class_<PageMover>(m, "PageMover",
                        "Appends copies of KV pages to streams. The memory behind the addresses\n"
                        "outlives them. One thread calls it.")
      .def(py::init([](int device, std::uint64_t slots_base, std::int64_t num_slots,
                       std::uint64_t slot_bytes, std::uint64_t layer_bytes,
                       std::uint64_t page_bytes, std::vector<std::uint64_t> layer_bases,
                       std::int64_t num_blocks, std::uint64_t block_stride,
                       std::vector<std::uint64_t> run_offsets, std::uint64_t run_bytes,
                       std::uint64_t rows_base, std::int64_t num_rows, std::uint64_t arrays) {
             PageShape shape{slots_base,  num_slots,    slot_bytes,
                             layer_bytes, page_bytes,   std::move(layer_bases),
                             num_blocks,  block_stride, std::move(run_offsets),
                             run_bytes,   rows_base,    num_rows};
             const py::gil_scoped_release release;
             return std::make_unique<PageMover>(device, std::move(shape), arrays);
           }),
           py::kw_only(), py::arg("device"), py::arg("slots_base"), py::arg("num_slots"),
           py::arg("slot_bytes"), py::arg("layer_bytes"), py::arg("page_bytes"),
           py::arg("layer_bases"), py::arg("num_blocks"), py::arg("block_stride"),
           py::arg("run_offsets"), py::arg("run_bytes"), py::arg("rows_base"), py::arg("num_rows"),
           py::arg("arrays"))
      .def(
          "by_kernel",
          [](const PageMover& self, Move move, const Copies& copies, const Rows& rows,
             std::int64_t first_layer, std::int64_t stop_layer, std::uint64_t table_device,
             std::uint64_t table_host, std::uint32_t thread_blocks, std::uint64_t stream) {
            const PageTable table{as_copies(copies), as_rows(rows)};
            const py::gil_scoped_release release;
            self.by_kernel(move, table, {first_layer, stop_layer}, {table_device, table_host},
                           thread_blocks, as_stream(stream));
          },
          py::arg("move"), py::arg("copies"), py::arg("rows"), py::arg("first_layer"),
          py::arg("stop_layer"), py::arg("table_device"), py::arg("table_host"),
          py::arg("thread_blocks"), py::arg("stream"),
          "Copy by the kernel, which reads its table at `table_device`; it is brought there from\n"
          "page-locked memory at `table_host` unless that is 0.")
      .def(
          "by_dma",
          [](const PageMover& self, Move move, const Copies& copies, const Rows& rows,
             std::int64_t first_layer, std::int64_t stop_layer, std::uint64_t stream) {
            const PageTable table{as_copies(copies), as_rows(rows)};
            const py::gil_scoped_release release;
            self.by_dma(move, table, {first_layer, stop_layer}, as_stream(stream));
          },
          py::arg("move"), py::arg("copies"), py::arg("rows"), py::arg("first_layer"),
          py::arg("stop_layer"), py::arg("stream"), "Copy by the copy engines.")
      .def(
          "count_runs",
          [](const PageMover& self, Move move, const Copies& copies, const Rows& rows) {
            const PageTable table{as_copies(copies), as_rows(rows)};
            const py::gil_scoped_release release;
            return self.count_runs(move, table);
          },
          py::arg("move"), py::arg("copies"), py::arg("rows"),
          "Contiguous runs of one layer of these pages, neighbours counted as one.");
}

void bind_page_turner(py::module_& m) {
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
  py::class_<PageTurner>(m, "PageTurner",
                         "Appends loads of single tokens, K turned to their new positions, to\n"
                         "streams. The memory behind the addresses outlives them. One thread\n"
                         "calls it.")
      .def(py::init([](int device, std::uint64_t slots_base, std::int64_t num_slots,
                       std::uint64_t slot_bytes, std::uint64_t layer_bytes,
                       std::uint64_t page_bytes, std::vector<std::uint64_t> layer_bases,
                       std::int64_t num_blocks, std::uint64_t block_stride,
                       std::vector<std::uint64_t> run_offsets, std::uint64_t run_bytes,
                       std::uint64_t arrays, const Side& key, const Side& value,
                       std::int64_t num_heads, std::int64_t head_dim, std::int64_t block_tokens,
                       const std::string& dtype, bool is_neox, std::vector<double> theta) {
             PageShape pages{slots_base,  num_slots,    slot_bytes,
                             layer_bytes, page_bytes,   std::move(layer_bases),
                             num_blocks,  block_stride, std::move(run_offsets),
                             run_bytes};
             RotationShape rotation{{as_side(key), as_side(value)},
                                    num_heads,
                                    head_dim,
                                    block_tokens,
                                    as_type(dtype),
                                    is_neox ? Pairing::kNeox : Pairing::kGptj,
                                    std::move(theta)};
             const py::gil_scoped_release release;
             return std::make_unique<PageTurner>(device, std::move(pages), std::move(rotation),
                                                 arrays);
           }),
           py::kw_only(), py::arg("device"), py::arg("slots_base"), py::arg("num_slots"),
           py::arg("slot_bytes"), py::arg("layer_bytes"), py::arg("page_bytes"),
           py::arg("layer_bases"), py::arg("num_blocks"), py::arg("block_stride"),
           py::arg("run_offsets"), py::arg("run_bytes"), py::arg("arrays"), py::arg("key"),
           py::arg("value"), py::arg("num_heads"), py::arg("head_dim"), py::arg("block_tokens"),
           py::arg("dtype"), py::arg("is_neox"), py::arg("theta"))
      .def(
          "check",
          [](const PageTurner& self, const Moved& moved, std::int64_t first_layer,
             std::int64_t stop_layer) {
            auto all = as_moved(moved);
            const py::gil_scoped_release release;
            self.check(std::move(all), {first_layer, stop_layer});
          },
          py::arg("moved"), py::arg("first_layer"), py::arg("stop_layer"))
      .def(
          "table",
          [](const PageTurner& self, const Moved& moved) {
            const auto all = as_moved(moved);
            const py::gil_scoped_release release;
            return self.table(all);
          },
          py::arg("moved"), "The table of these tokens ([n, 6] int64).")
      .def(
          "load",
          [](const PageTurner& self, const MoveTable& table, std::int64_t first_layer,
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
      .def_property_readonly("is_wide", &PageTurner::is_wide);
}

}  // namespace

PYBIND11_MODULE(_native_cuda, m) {
  m.doc() = "CUDA half of the native data path of attnstore_vllm.";
  bind_page_mover(m);
  bind_page_turner(m);
  m.def("register_host", &register_host, py::arg("address"), py::arg("num_bytes"),
        py::call_guard<py::gil_scoped_release>(),
        "Page-lock memory of this process; returns its address as the device sees it.");
  m.def("unregister_host", &unregister_host, py::arg("address"),
        py::call_guard<py::gil_scoped_release>());
  m.attr("runtime_version") = CUDART_VERSION;
}
