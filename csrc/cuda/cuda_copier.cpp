// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_copier.h"

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
      arrays_(reinterpret_cast<const Offsets*>(arrays)) {
  check_shape(shape_);
  for (std::size_t i = 0; i < kNumCopies; ++i) {
    const auto [source, target] = places_of(static_cast<Copy>(i));
    offsets_[i] = offsets_of(shape_, source, target);
  }
}

std::vector<Offsets> CudaPageCopier::arrays_of(const PageShape& shape) {
  std::vector<Offsets> all;
  for (std::size_t i = 0; i < kNumCopies; ++i) {
    const auto [source, target] = places_of(static_cast<Copy>(i));
    const CopyOffsets found = offsets_of(shape, source, target);
    all.insert(all.end(), found.layers.begin(), found.layers.end());
    all.insert(all.end(), found.runs.begin(), found.runs.end());
  }
  return all;
}

PageBatch CudaPageCopier::prepare(Copy copy, const PageTable& table) const {
  check_copies(shape_, table.copies, {0, 0});
  if (has_rows(copy)) check_rows(shape_, table);
  const auto [source, target] = places_of(copy);
  PageBatch batch;
  batch.copy = copy;
  batch.pages = first_runs(shape_, source, target, table);
  add_runs(shape_, source, target, table, 0, &batch.runs);
  merge_runs(shape_, source, target, &batch.runs);
  return batch;
}

void CudaPageCopier::by_kernel(const PageBatch& batch, LayerRange layers, StagedTable staged,
                               std::uint32_t thread_blocks, CuStream stream) const {
  check_copies(shape_, {}, layers);
  if (batch.pages.empty()) return;
  const InContext in_context(loaded(kernels_).context());
  bring_table(staged, batch.pages.size() * sizeof(Offsets), stream);
  const auto [source, target] = places_of(batch.copy);
  const std::size_t num_layers = shape_.layer_bases.size();
  const Offsets* const arrays =
      arrays_ + static_cast<std::size_t>(batch.copy) * (num_layers + shape_.run_offsets.size());
  const CopyArrays on_device{reinterpret_cast<const Offsets*>(staged.device), arrays,
                             arrays + num_layers};
  const std::uint32_t width = word_bytes(shape_, source, target);
  const auto num_pages = static_cast<std::uint32_t>(batch.pages.size());
  for (const CopyJob& job : make_jobs(shape_, on_device, num_pages, layers, width)) {
    kernels_->copy(job, width, thread_blocks, stream);
  }
}

void CudaPageCopier::by_dma(PageBatch* batch, LayerRange layers, CuStream stream) const {
  check_copies(shape_, {}, layers);
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
  const bool is_load = batch->copy == Copy::kLoad;
  copy_batch(&lists, is_load ? kCuSourceInAnyOrder : kCuSourceInStreamOrder, stream);
}

}  // namespace attnstore
