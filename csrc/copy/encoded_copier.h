// SPDX-License-Identifier: Apache-2.0
// Copies KV pages between a worker's KV tensors and slots that keep them encoded
// (codec/page_codec.h), on the CPU. Each page has a cell of its own in a slot:
//
//   cell = slots_base + slot * slot_bytes + (layer * blocks of a chunk + block_in_chunk) *
//   cell_bytes
//
// Behind a page's encoding its cell has zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/page_runs.h"

namespace attnstore {

class EncodedCopier {
 public:
  // `pages`: as page_runs.h has it, but that slot_bytes are those of cells; layer_bytes are of
  // pages as the tensors have them. Throws std::invalid_argument if it contradicts itself.
  EncodedCopier(PageShape pages, std::uint64_t cell_bytes);

  // As those of PageCopier. A load throws std::runtime_error if a cell holds no page: those blocks
  // are not to be used. A save returns the slots, each once, of which a page did not fit in its
  // cell: their content is not to be used.
  void load(const std::vector<PageCopy>& copies, LayerRange layers) const;
  [[nodiscard]] std::vector<std::int64_t> save(const std::vector<PageCopy>& copies,
                                               LayerRange layers) const;

 private:
  const PageShape shape_;
  const std::uint64_t cell_bytes_;
};

}  // namespace attnstore
