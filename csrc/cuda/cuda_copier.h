// SPDX-License-Identifier: Apache-2.0
// Copies pages between slots, KV tensors and the write buffer of one device. All copies are
// appended to a stream and over when it comes past them.
//
// Slots, rows and spans may keep pages of bfloat16 encoded, in cells (codec/page_codec.h). Then
// what goes from or to blocks goes by the kernel, which decodes or encodes it.
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
  kLoad,     // slots to blocks
  kSave,     // blocks to slots
  kGather,   // blocks to rows
  kDrain,    // rows to slots
  kFill,     // slots to a span of the read buffer
  kScatter,  // a span of the read buffer to blocks
};
constexpr std::size_t kNumCopies = 4;  // of which each has arrays of all layers

// The read buffer: spans of one size in the device's memory, each of which takes pages of one
// layer, one after the other.
struct ReadSpans {
  std::uint64_t base = 0;
  std::uint64_t span_bytes = 0;  // a multiple of 16
  std::int64_t num_spans = 0;
};

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
  //
  // `cell_bytes`: of pages that slots, rows and spans keep encoded, multiples of 8 as all places of
  // cells are; slot_bytes are those of cells then, and layer_bytes those of pages as the tensors
  // have them. 0: they are kept as they are.
  CudaPageCopier(std::shared_ptr<const Kernels> kernels, PageShape shape, ReadSpans spans,
                 std::uint64_t arrays, std::uint64_t cell_bytes = 0);

  // What the kernel reads besides pages, for each kind of copy.
  static std::vector<Offsets> arrays_of(const PageShape& shape, const ReadSpans& spans,
                                        std::uint64_t cell_bytes = 0);

  // Throws std::out_of_range for a slot, block or row that does not exist. Calls nothing of CUDA.
  [[nodiscard]] PageBatch prepare(Copy copy, const PageTable& table) const;

  // By the kernel, in at most `thread_blocks` of its blocks. `staged` holds the batch's pages.
  // Throws std::out_of_range, before anything of CUDA is called, for a layer that does not exist;
  // by_dma too.
  //
  // `failed`: of a word on the device, or page-locked, which gets 1 when a cell holds no page, or a
  // page does not fit in its cell; then the first base of that cell is 255.
  void by_kernel(const PageBatch& batch, LayerRange layers, StagedTable staged,
                 std::uint32_t thread_blocks, CuStream stream, std::uint64_t failed = 0) const;

  // By the copy engines. `reads_early`: the driver may read the slots of a load from now on; else,
  // and what else is copied, when the stream comes to it. Throws std::invalid_argument where pages
  // are to be encoded or decoded.
  void by_dma(PageBatch* batch, LayerRange layers, bool reads_early, CuStream stream) const;

  // Slots to a span, by the copy engines: one layer of a batch of kFill. Throws std::out_of_range
  // for a layer or a span that does not exist; scatter() too.
  void fill(PageBatch* batch, std::int64_t layer, std::int64_t span, bool reads_early,
            CuStream stream) const;

  // A span to blocks, by the kernel: one layer of `count` pages of a batch of kScatter, from
  // `first` on. Their rows count from the span's beginning.
  void scatter(const PageBatch& batch, std::int64_t layer, std::int64_t first, std::int64_t count,
               std::int64_t span, StagedTable staged, std::uint32_t thread_blocks, CuStream stream,
               std::uint64_t failed = 0) const;

  // Brings the table of a batch to the device, ahead of what reads it.
  void bring(const PageBatch& batch, StagedTable staged, CuStream stream) const;

  // How many pages a span takes; 0: it is too small for one.
  [[nodiscard]] std::int64_t span_pages() const { return span_sides_.cells.num_rows; }

  // Of a page in a slot.
  [[nodiscard]] std::uint64_t page_bytes() const { return sides_.cells.page_bytes; }

  [[nodiscard]] bool is_encoded() const { return is_encoded_; }

 private:
  void check_span(std::int64_t layer, std::int64_t span) const;
  [[nodiscard]] bool codes(Copy copy) const;
  void give(const PageSides& sides, Copy copy, const CopyArrays& arrays, std::uint32_t num_pages,
            LayerRange layers, std::uint32_t thread_blocks, std::uint64_t failed,
            CuStream stream) const;

  const std::shared_ptr<const Kernels> kernels_;
  const bool is_encoded_;
  const PageSides sides_;
  const ReadSpans spans_;
  const PageSides span_sides_;  // whose write buffer is the first span
  const Offsets* const arrays_;
  std::array<CopyOffsets, kNumCopies> offsets_;
};

}  // namespace attnstore
