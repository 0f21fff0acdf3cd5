// SPDX-License-Identifier: Apache-2.0
// Copies pages between slots, KV tensors and the write buffer of one device. All copies are
// appended to a stream and over when it comes past them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy/page_runs.h"
#include "cuda/batched_copy.h"
#include "cuda/copy_jobs.h"
#include "cuda/kernels.h"
#include "cuda/on_device.h"

namespace attnstore {

enum class Copy : std::uint8_t {
  kLoad,    // slots to blocks
  kSave,    // blocks to slots
  kGather,  // blocks to rows
  kDrain,   // rows to slots
};
constexpr std::size_t kNumCopies = 4;

// Pages that exist, for copies of one kind in one layer or several at a time. What does not depend
// on the layer is worked out once.
struct PageBatch {
  Copy copy;
  // Where each page is in layer 0: what the kernel reads.
  std::vector<Offsets> pages;
  // Contiguous runs in layer 0, neighbours that continue each other on both sides counted as one.
  std::vector<Run> runs;
  // Of the layers that went by DMA last.
  RunLists lists;
};

class CudaPageCopier {
 public:
  // `shape` holds addresses as the device sees them. `arrays` is where arrays_of(shape) is in the
  // device's memory, which is the caller's and outlives this. Throws std::invalid_argument if the
  // shape contradicts itself. Calls nothing of CUDA.
  CudaPageCopier(std::shared_ptr<const Kernels> kernels, PageShape shape, std::uint64_t arrays);

  // What the kernel reads besides pages, for each kind of copy.
  static std::vector<Offsets> arrays_of(const PageShape& shape);

  // Throws std::out_of_range for a slot, block or row that does not exist. Calls nothing of CUDA.
  [[nodiscard]] PageBatch prepare(Copy copy, const PageTable& table) const;

  // By the kernel, in at most `thread_blocks` of its blocks. `staged` holds the batch's pages.
  // Throws std::out_of_range, before anything of CUDA is called, for a layer that does not exist;
  // by_dma too.
  void by_kernel(const PageBatch& batch, LayerRange layers, StagedTable staged,
                 std::uint32_t thread_blocks, CuStream stream) const;

  // By the copy engines.
  void by_dma(PageBatch* batch, LayerRange layers, CuStream stream) const;

  [[nodiscard]] std::uint64_t page_bytes() const { return shape_.page_bytes; }

 private:
  const std::shared_ptr<const Kernels> kernels_;
  const PageShape shape_;
  const Offsets* const arrays_;
  std::array<CopyOffsets, kNumCopies> offsets_;
};

}  // namespace attnstore
