// SPDX-License-Identifier: Apache-2.0
// Copies whole KV pages between a worker's KV tensors and its part of the pool's slots, on the CPU.
// page_map.h says where a page's bytes are.
#pragma once

#include <vector>

#include "copy/page_runs.h"

namespace attnstore {

class PageCopier {
 public:
  // Throws std::invalid_argument if the shape contradicts itself.
  explicit PageCopier(PageShape shape);

  // Fills blocks from slots, or slots from blocks, in these layers, on the model's own threads
  // (omp_team.h), and returns when that is done. Of the places that are filled none is named twice.
  // Throws std::out_of_range, before anything is copied, for a slot, block or layer that does not
  // exist.
  void load(const std::vector<PageCopy>& copies, LayerRange layers) const;
  void save(const std::vector<PageCopy>& copies, LayerRange layers) const;

 private:
  void copy(Place source, Place target, const std::vector<PageCopy>& copies,
            LayerRange layers) const;

  const PageShape shape_;
};

}  // namespace attnstore
