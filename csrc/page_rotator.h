// SPDX-License-Identifier: Apache-2.0
// Copies KV of single tokens from slots into blocks at other positions, on the CPU: K turned by the
// difference of the positions (rotation.h), V as it is. On the model's own threads (omp_team.h).
#pragma once

#include <cstdint>
#include <vector>

#include "page_runs.h"
#include "rotate_block.h"

namespace attnstore {

// Tokens of one chunk that follow each other, and where they go in one block.
struct MovedTokens {
  std::int64_t slot;
  std::int64_t first_in_chunk;
  std::int64_t num_tokens;
  std::int64_t block_id;
  std::int64_t first_in_block;
  std::int64_t shift;  // target position less source position
};

// How the content of a page is to be understood.
struct RotationShape {
  ContentMap content;
  std::int64_t num_heads;
  std::int64_t head_dim;
  std::int64_t block_tokens;
  ElementType type;
  Pairing pairing;
  std::vector<double> theta;  // radians a position, of each pair; dims that no pair has are copied
};

class PageRotator {
 public:
  // Throws std::invalid_argument if the shapes contradict themselves or each other: among others if
  // an element of K or V is not within the page, or two are at one place.
  PageRotator(PageShape pages, RotationShape rotation,
              RotateBlock rotate_block = rotate_blocks().front());
  PageRotator(const PageRotator&) = delete;
  PageRotator& operator=(const PageRotator&) = delete;

  // Fills these layers of the tokens' places and returns when that is done; other tokens of the
  // blocks are not touched. Throws std::out_of_range, before anything is copied, for a slot, token,
  // block, shift or layer that does not exist, and for a place that is named twice.
  void load(std::vector<MovedTokens> moved, LayerRange layers) const;

 private:
  void check_rotation() const;
  void check_moved(const std::vector<MovedTokens>& moved, LayerRange layers) const;

  const PageShape pages_;
  const RotationShape rotation_;
  const RotateBlock rotate_block_;
  std::vector<std::int64_t> offsets_;
  BlockShape block_;
};

}  // namespace attnstore
