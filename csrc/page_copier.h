// SPDX-License-Identifier: Apache-2.0
// Copies whole KV pages between a worker's KV tensors and its part of the pool's slots, on the CPU.
// page_map.h says where a page's bytes are.
#pragma once

#include <vector>

#include "page_runs.h"

namespace attnstore {

class PageCopier {
 public:
  // Throws std::invalid_argument if the shape contradicts itself.
  explicit PageCopier(PageShape shape);

  // Fills blocks from slots, or slots from blocks, in these layers, and returns when that is done.
  // Throws std::out_of_range, before anything is copied, for a slot, block or layer that does not
  // exist.
  void load(std::vector<PageCopy> copies, LayerRange layers) const;
  void save(std::vector<PageCopy> copies, LayerRange layers) const;

 private:
  void copy(Place source, Place target, std::vector<PageCopy> copies, LayerRange layers) const;

  const PageShape shape_;
};

}  // namespace attnstore
