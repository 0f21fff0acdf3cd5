// SPDX-License-Identifier: Apache-2.0
// Copies KV of single tokens from slots into blocks at other positions, on the CPU: K turned by the
// difference of the positions (rotation.h), V as it is. On the model's own threads (omp_team.h).
#pragma once

#include <cstdint>
#include <vector>

#include "rotate/moved_tokens.h"
#include "rotate/rotate_block.h"

namespace attnstore {

class PageRotator {
 public:
  // Throws std::invalid_argument if the shapes contradict themselves or each other.
  PageRotator(PageShape pages, RotationShape rotation,
              RotateBlock rotate_block = rotate_blocks().front());
  PageRotator(const PageRotator&) = delete;
  PageRotator& operator=(const PageRotator&) = delete;

  // Fills these layers of the tokens' places and returns when that is done; other tokens of the
  // blocks are not touched. Throws std::out_of_range, before anything is copied (check_moved).
  void load(std::vector<MovedTokens> moved, LayerRange layers) const;

 private:
  const PageShape pages_;
  const RotationShape rotation_;
  const RotateBlock rotate_block_;
  std::vector<std::int64_t> offsets_;
  BlockShape block_;
};

}  // namespace attnstore
