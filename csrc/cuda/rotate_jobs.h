// SPDX-License-Identifier: Apache-2.0
// Makes a table of moved tokens, and cuts the work into jobs that one kernel can do. Needs no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/rotate_words.h"
#include "rotate/moved_tokens.h"

namespace attnstore {

// What the kernel reads of its tokens: a TokenMove each, and from the next multiple of 16 bytes on
// the angles of each turn that K makes. Wherever it lies begins at a multiple of 16 bytes.
struct MoveTable {
  std::vector<std::int64_t> words;
  std::uint32_t num_tokens;

  // In bytes.
  [[nodiscard]] std::uint64_t angles_at() const;
};

// Throws std::invalid_argument for pages that are too large, or of which there are too many, for
// the 32-bit numbers of a TokenMove.
void check_sizes(const PageShape& pages);

// Whether all words are 16 bytes. `pages` has the addresses that the kernel uses.
bool has_wide_words(const PageShape& pages, const RotationShape& rotation);

// In the order of `moved`, which is not empty and was checked (check_moved).
MoveTable make_move_table(const RotationShape& rotation, const std::vector<MovedTokens>& moved);

// The jobs that move these tokens in these layers, in the order of the layers. `map` and `table`
// are the addresses that the kernel uses. Each job has at most `items_max` items, which are at
// least one token's; no layers make no job.
std::vector<RotateJob> make_rotate_jobs(const PageMap& map, const RotationShape& rotation,
                                        bool is_wide, const MoveTable& words, std::uint64_t table,
                                        LayerRange layers, std::uint32_t items_max = kItemsMax);

}  // namespace attnstore
