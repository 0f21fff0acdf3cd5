// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_copier.h"

#include <utility>

#include "cuda/batched_copy.h"
#include "cuda/copy_jobs.h"

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
      break;
  }
  return {Place::kRow, Place::kSlot};
}

bool has_rows(Copy copy) { return copy == Copy::kGather || copy == Copy::kDrain; }

}  // namespace

CudaPageCopier::CudaPageCopier(std::shared_ptr<const Kernels> kernels, PageShape shape,
                               std::uint64_t arrays)
    : kernels_(std::move(kernels)),
      shape_(std::move(shape)),
      arrays_(reinterpret_cast<const std::uint64_t*>(arrays)) {
  check_shape(shape_);
}

void CudaPageCopier::check(Copy copy, const PageTable& table, LayerRange layers) const {
  check_copies(shape_, table.copies, layers);
  if (has_rows(copy)) check_rows(shape_, table);
}

void CudaPageCopier::by_kernel(Copy copy, const PageTable& table, LayerRange layers,
                               StagedTable staged, std::uint32_t thread_blocks,
                               CuStream stream) const {
  check(copy, table, layers);
  if (table.copies.empty()) return;
  const InContext in_context(loaded(kernels_).context());
  auto* const copies = reinterpret_cast<PageCopy*>(staged.device);
  auto* const rows = reinterpret_cast<std::int64_t*>(copies + table.copies.size());
  const std::size_t row_bytes = has_rows(copy) ? table.rows.size() * sizeof(std::int64_t) : 0;
  bring_table(staged, table.copies.size() * sizeof(PageCopy) + row_bytes, stream);
  PageMap map = shape_.map();
  map.layer_bases = arrays_;
  map.run_offsets = arrays_ + shape_.layer_bases.size();
  const auto [source, target] = places_of(copy);
  const TableView view{copies, has_rows(copy) ? rows : nullptr,
                       static_cast<std::uint32_t>(table.copies.size())};
  const std::uint32_t width = word_bytes(shape_, source, target);
  for (const CopyJob& job : make_jobs(map, source, target, view, layers, width)) {
    kernels_->copy(job, width, thread_blocks, stream);
  }
}

void CudaPageCopier::by_dma(Copy copy, const PageTable& table, LayerRange layers,
                            CuStream stream) const {
  check(copy, table, layers);
  const InContext in_context(loaded(kernels_).context());
  const auto [source, target] = places_of(copy);
  std::vector<Run> runs;
  for (std::int64_t layer = layers.first; layer < layers.stop; ++layer) {
    add_runs(shape_, source, target, table, static_cast<std::size_t>(layer), &runs);
  }
  merge_runs(&runs);
  // Slots are loaded from when their saves are over. A save or a drain reads what the model or a
  // gather has just been given to write.
  const bool is_load = copy == Copy::kLoad;
  copy_batch(runs, is_load ? kCuSourceInAnyOrder : kCuSourceInStreamOrder, stream);
}

std::size_t CudaPageCopier::count_runs(Copy copy, const PageTable& table) const {
  check(copy, table, {0, 0});
  const auto [source, target] = places_of(copy);
  std::vector<Run> runs;
  add_runs(shape_, source, target, table, 0, &runs);
  merge_runs(&runs);
  return runs.size();
}

}  // namespace attnstore
