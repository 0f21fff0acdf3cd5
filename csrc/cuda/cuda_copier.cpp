// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_copier.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace attnstore {

namespace {

struct Places {
  Place source;
  Place target;
};

Places places_of(Copy copy) {
  switch (copy) {
    case Copy::kLoad:
      return {Place::kSlot, Place::kBlock};
    case Copy::kSave:
      return {Place::kBlock, Place::kSlot};
    case Copy::kGather:
      return {Place::kBlock, Place::kRow};
    case Copy::kDrain:
      return {Place::kRow, Place::kSlot};
    case Copy::kFill:
      return {Place::kSlot, Place::kRow};
    case Copy::kScatter:
      break;
  }
  return {Place::kRow, Place::kBlock};
}

bool is_through_spans(Copy copy) { return copy == Copy::kFill || copy == Copy::kScatter; }

bool has_rows(Copy copy) { return copy != Copy::kLoad && copy != Copy::kSave; }

void check_direct(Copy copy) {
  if (is_through_spans(copy)) throw std::invalid_argument("it goes through the read buffer");
}

PageSides sides_of(const PageShape& shape, std::uint64_t cell_bytes) {
  if (cell_bytes == 0) return {shape, shape};
  PageShape cells = shape;
  cells.page_bytes = cells.run_bytes = cell_bytes;
  cells.layer_bytes = shape.layer_bytes / std::max<std::uint64_t>(1, shape.page_bytes) * cell_bytes;
  cells.run_offsets = {0};
  return {shape, cells};
}

PageSides checked(PageSides sides, bool is_encoded) {
  check_shape(sides.cells);
  if (!is_encoded) return sides;
  PageShape whole = sides.blocks;  // slots of pages as the tensors have them
  whole.slot_bytes = whole.layer_bytes * whole.layer_bases.size();
  check_shape(whole);
  if (sides.blocks.page_bytes % 2 != 0) {
    throw std::invalid_argument("a page that is to be encoded has an odd number of bytes");
  }
  constexpr std::uint64_t kPageMax = 1ULL << 30;
  if (sides.blocks.page_bytes > kPageMax ||
      code_parts(sides.blocks.page_bytes).escapes > sides.cells.page_bytes) {
    throw std::invalid_argument("a cell has no room for any page");
  }
  const PageShape& cells = sides.cells;
  if ((cells.slots_base | cells.slot_bytes | cells.page_bytes | cells.rows_base) % sizeof(Word8)) {
    throw std::invalid_argument("cells are not at multiples of 8 bytes");
  }
  return sides;
}

PageSides in_first_span(PageSides sides, const ReadSpans& spans) {
  for (PageShape* const shape : {&sides.blocks, &sides.cells}) {
    shape->rows_base = spans.base;
    const std::uint64_t page_bytes = std::max<std::uint64_t>(1, sides.cells.page_bytes);
    shape->num_rows = static_cast<std::int64_t>(spans.span_bytes / page_bytes);
  }
  return sides;
}

// On the side of blocks.
std::uint32_t coded_word_bytes(const PageShape& blocks) {
  return word_bytes(blocks, Place::kBlock, Place::kBlock) == sizeof(Word16) ? sizeof(Word16)
                                                                            : sizeof(std::uint16_t);
}

}  // namespace

CudaPageCopier::CudaPageCopier(std::shared_ptr<const Kernels> kernels, PageShape shape,
                               ReadSpans spans, std::uint64_t arrays, std::uint64_t cell_bytes)
    : kernels_(std::move(kernels)),
      is_encoded_(cell_bytes != 0),
      sides_(checked(sides_of(shape, cell_bytes), cell_bytes != 0)),
      spans_(spans),
      span_sides_(in_first_span(sides_, spans)),
      arrays_(reinterpret_cast<const Offsets*>(arrays)) {
  if ((spans_.base | spans_.span_bytes) % sizeof(Word16) != 0) {
    throw std::invalid_argument("a span of the read buffer is not whole words");
  }
  for (std::size_t i = 0; i < kNumCopies; ++i) {
    const auto [source, target] = places_of(static_cast<Copy>(i));
    offsets_[i] = offsets_of(sides_, source, target);
  }
}

std::vector<Offsets> CudaPageCopier::arrays_of(const PageShape& shape, const ReadSpans& spans,
                                               std::uint64_t cell_bytes) {
  std::vector<Offsets> all;
  const PageSides sides = sides_of(shape, cell_bytes);
  for (std::size_t i = 0; i < kNumCopies; ++i) {
    const auto [source, target] = places_of(static_cast<Copy>(i));
    const CopyOffsets found = offsets_of(sides, source, target);
    all.insert(all.end(), found.layers.begin(), found.layers.end());
    all.insert(all.end(), found.runs.begin(), found.runs.end());
  }
  const CopyOffsets found = offsets_of(in_first_span(sides, spans), Place::kRow, Place::kBlock);
  for (std::int64_t span = 0; span < spans.num_spans; ++span) {
    const auto skipped = static_cast<std::uint64_t>(span) * spans.span_bytes;
    for (const Offsets& layer : found.layers) all.push_back({skipped, layer.target});
  }
  all.insert(all.end(), found.runs.begin(), found.runs.end());
  return all;
}

PageBatch CudaPageCopier::prepare(Copy copy, const PageTable& table) const {
  check_copies(sides_.blocks, table.copies, {0, 0});
  const PageSides& sides = is_through_spans(copy) ? span_sides_ : sides_;
  if (has_rows(copy)) check_rows(sides.cells, table);
  const auto [source, target] = places_of(copy);
  PageBatch batch;
  batch.copy = copy;
  batch.pages = first_runs(sides, source, target, table);
  if (codes(copy)) return batch;
  add_runs(sides.cells, source, target, table, 0, &batch.runs);
  merge_runs(sides.cells, source, target, &batch.runs);
  return batch;
}

// Whether pages change their form on the way.
bool CudaPageCopier::codes(Copy copy) const {
  return is_encoded_ && copy != Copy::kDrain && copy != Copy::kFill;
}

void CudaPageCopier::give(const PageSides& sides, Copy copy, const CopyArrays& arrays,
                          std::uint32_t num_pages, LayerRange layers, std::uint32_t thread_blocks,
                          std::uint64_t failed, CuStream stream) const {
  if (codes(copy)) {
    if (failed == 0) throw std::invalid_argument("it has no word for what fails");
    const bool is_decoding = copy == Copy::kLoad || copy == Copy::kScatter;
    const std::uint32_t width = coded_word_bytes(sides.blocks);
    for (const CodeJob& job :
         make_code_jobs(sides, arrays, num_pages, layers, is_decoding, failed)) {
      kernels_->code(job, is_decoding, width, thread_blocks, stream);
    }
    return;
  }
  const auto [source, target] = places_of(copy);
  const std::uint32_t width = word_bytes(sides.cells, source, target);
  for (const CopyJob& job : make_jobs(sides.cells, arrays, num_pages, layers, width)) {
    kernels_->copy(job, width, thread_blocks, stream);
  }
}

void CudaPageCopier::by_kernel(const PageBatch& batch, LayerRange layers, StagedTable staged,
                               std::uint32_t thread_blocks, CuStream stream,
                               std::uint64_t failed) const {
  check_copies(sides_.blocks, {}, layers);
  check_direct(batch.copy);
  if (batch.pages.empty()) return;
  const InContext in_context(loaded(kernels_).context());
  bring_table(staged, batch.pages.size() * sizeof(Offsets), stream);
  const std::size_t num_layers = sides_.blocks.layer_bases.size();
  const Offsets* const arrays = arrays_ + static_cast<std::size_t>(batch.copy) *
                                              (num_layers + sides_.blocks.run_offsets.size());
  const CopyArrays on_device{reinterpret_cast<const Offsets*>(staged.device), arrays,
                             arrays + num_layers};
  give(sides_, batch.copy, on_device, static_cast<std::uint32_t>(batch.pages.size()), layers,
       thread_blocks, failed, stream);
}

void CudaPageCopier::by_dma(PageBatch* batch, LayerRange layers, bool reads_early,
                            CuStream stream) const {
  check_copies(sides_.blocks, {}, layers);
  check_direct(batch->copy);
  if (codes(batch->copy)) throw std::invalid_argument("pages are encoded by the kernel alone");
  const InContext in_context(loaded(kernels_).context());
  const std::vector<Offsets>& offsets = offsets_[static_cast<std::size_t>(batch->copy)].layers;
  RunLists& lists = batch->lists;
  const auto num_layers = static_cast<std::size_t>(layers.stop - layers.first);
  const std::size_t count = num_layers * batch->runs.size();
  if (lists.sizes.size() != count) {
    lists.sources.resize(count);
    lists.targets.resize(count);
    lists.sizes.clear();
    for (std::size_t layer = 0; layer < num_layers; ++layer) {
      for (const Run& run : batch->runs) lists.sizes.push_back(run.num_bytes);
    }
  }
  std::size_t at = 0;
  for (std::int64_t layer = layers.first; layer < layers.stop; ++layer) {
    const Offsets offset = offsets[static_cast<std::size_t>(layer)];
    for (const Run& run : batch->runs) {
      lists.sources[at] = reinterpret_cast<CuAddress>(run.source) + offset.source;
      lists.targets[at++] = reinterpret_cast<CuAddress>(run.target) + offset.target;
    }
  }
  // Slots are loaded from when their saves are over. A save or a drain reads what the model or a
  // gather has just been given to write.
  const bool is_early = reads_early && batch->copy == Copy::kLoad;
  copy_batch(&lists, is_early ? kCuSourceInAnyOrder : kCuSourceInStreamOrder, stream);
}

void CudaPageCopier::check_span(std::int64_t layer, std::int64_t span) const {
  check_copies(sides_.blocks, {}, {layer, layer + 1});
  if (span < 0 || span >= spans_.num_spans) {
    throw std::out_of_range("span " + std::to_string(span) + " of " +
                            std::to_string(spans_.num_spans) + " does not exist");
  }
}

void CudaPageCopier::fill(PageBatch* batch, std::int64_t layer, std::int64_t span, bool reads_early,
                          CuStream stream) const {
  check_span(layer, span);
  const InContext in_context(loaded(kernels_).context());
  const std::uint64_t of_layer = offsets_[static_cast<std::size_t>(Copy::kLoad)]
                                     .layers[static_cast<std::size_t>(layer)]
                                     .source;
  const std::uint64_t of_span = static_cast<std::uint64_t>(span) * spans_.span_bytes;
  RunLists& lists = batch->lists;
  lists.sources.clear();
  lists.targets.clear();
  lists.sizes.clear();
  for (const Run& run : batch->runs) {
    lists.sources.push_back(reinterpret_cast<CuAddress>(run.source) + of_layer);
    lists.targets.push_back(reinterpret_cast<CuAddress>(run.target) + of_span);
    lists.sizes.push_back(run.num_bytes);
  }
  copy_batch(&lists, reads_early ? kCuSourceInAnyOrder : kCuSourceInStreamOrder, stream);
}

void CudaPageCopier::bring(const PageBatch& batch, StagedTable staged, CuStream stream) const {
  const std::size_t num_bytes = batch.pages.size() * sizeof(Offsets);
  const InContext in_context(loaded(kernels_).context());
  bring_table(staged, num_bytes, stream);
}

void CudaPageCopier::scatter(const PageBatch& batch, std::int64_t layer, std::int64_t first,
                             std::int64_t count, std::int64_t span, StagedTable staged,
                             std::uint32_t thread_blocks, CuStream stream,
                             std::uint64_t failed) const {
  check_span(layer, span);
  const auto num_pages = static_cast<std::int64_t>(batch.pages.size());
  if (first < 0 || count < 0 || count > span_pages() || first > num_pages - count) {
    throw std::out_of_range("pages " + std::to_string(first) + " to " +
                            std::to_string(first + count) + " of " + std::to_string(num_pages) +
                            " are not in a span");
  }
  const InContext in_context(loaded(kernels_).context());
  const std::size_t num_layers = sides_.blocks.layer_bases.size();
  const Offsets* const of_spans =
      arrays_ + kNumCopies * (num_layers + sides_.blocks.run_offsets.size());
  const CopyArrays on_device{reinterpret_cast<const Offsets*>(staged.device) + first,
                             of_spans + static_cast<std::size_t>(span) * num_layers,
                             of_spans + static_cast<std::size_t>(spans_.num_spans) * num_layers};
  give(span_sides_, Copy::kScatter, on_device, static_cast<std::uint32_t>(count),
       {layer, layer + 1}, thread_blocks, failed, stream);
}

}  // namespace attnstore
