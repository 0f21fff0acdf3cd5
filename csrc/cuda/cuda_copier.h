// SPDX-License-Identifier: Apache-2.0
// Copies pages between slots, KV tensors and the write buffer of one device. All copies are
// appended to a stream and over when it comes past them.
#pragma once

#include <cstdint>
#include <memory>

#include "copy/page_runs.h"
#include "cuda/kernels.h"
#include "cuda/on_device.h"

namespace attnstore {

enum class Copy : std::uint8_t {
  kLoad,    // slots to blocks
  kSave,    // blocks to slots
  kGather,  // blocks to rows
  kDrain,   // rows to slots
};

class CudaPageCopier {
 public:
  // `shape` holds addresses as the device sees them. `arrays` is the address of its layer bases
  // and, behind them, its run offsets in the device's memory; they are the caller's and outlive
  // this. Throws std::invalid_argument if the shape contradicts itself. Calls nothing of CUDA.
  CudaPageCopier(std::shared_ptr<const Kernels> kernels, PageShape shape, std::uint64_t arrays);

  // By the kernel, on at most `thread_blocks` multiprocessors. `staged` holds what `table` does:
  // the pages, one after the other, and then the rows, if rows take part.
  void by_kernel(Copy copy, const PageTable& table, LayerRange layers, StagedTable staged,
                 std::uint32_t thread_blocks, CuStream stream) const;

  // By the copy engines.
  void by_dma(Copy copy, const PageTable& table, LayerRange layers, CuStream stream) const;

  // How many contiguous runs a layer of these pages is made of, neighbours counted as one.
  [[nodiscard]] std::size_t count_runs(Copy copy, const PageTable& table) const;

  // Throws std::out_of_range for a slot, block, row or layer that does not exist; by_kernel, by_dma
  // and count_runs do so before they call anything of CUDA.
  void check(Copy copy, const PageTable& table, LayerRange layers) const;

 private:
  const std::shared_ptr<const Kernels> kernels_;
  const PageShape shape_;
  const std::uint64_t* const arrays_;
};

}  // namespace attnstore
