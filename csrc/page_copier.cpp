// SPDX-License-Identifier: Apache-2.0
#include "page_copier.h"

#include <utility>

namespace attnstore {

PageCopier::PageCopier(PageShape shape) : shape_(std::move(shape)) { check_shape(shape_); }

void PageCopier::copy(Place source, Place target, std::vector<PageCopy> copies,
                      LayerRange layers) const {
  check_copies(shape_, copies, layers);
  const PageTable table{std::move(copies), {}};
  const auto first = static_cast<std::size_t>(layers.first);
  const auto stop = static_cast<std::size_t>(layers.stop);
  std::vector<Run> runs;
  runs.reserve((stop - first) * table.copies.size() * shape_.run_offsets.size());
  for (std::size_t layer = first; layer < stop; ++layer) {
    add_runs(shape_, source, target, table, layer, &runs);
  }
  copy_runs(runs);
}

void PageCopier::load(std::vector<PageCopy> copies, LayerRange layers) const {
  copy(Place::kSlot, Place::kBlock, std::move(copies), layers);
}

void PageCopier::save(std::vector<PageCopy> copies, LayerRange layers) const {
  copy(Place::kBlock, Place::kSlot, std::move(copies), layers);
}

}  // namespace attnstore
