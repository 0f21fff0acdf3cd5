// SPDX-License-Identifier: Apache-2.0
// Tokens whose KV goes to other positions: how they are named, the check that what is named exists,
// and the angles that K is turned by. On the host, for the CPU and for CUDA.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "copy/page_runs.h"
#include "rotate/rotation.h"

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

// Throws std::invalid_argument if the shapes contradict themselves or each other: among others if
// an element of K or V is not within the page, or two are at one place.
void check_rotation(const PageShape& pages, const RotationShape& rotation);

// By block, and in it by token.
void sort_by_place(std::vector<MovedTokens>* moved);

// `moved` is sorted by place. Throws std::out_of_range for a slot, token, block, shift or layer
// that does not exist, and for a place that is named twice.
void check_moved(const PageShape& pages, const RotationShape& rotation,
                 const std::vector<MovedTokens>& moved, LayerRange layers);

// For each shift but 0 the cosines of all pairs, and then the sines. Worked out in float64, and
// rounded once.
using Angles = std::map<std::int64_t, std::vector<float>>;
Angles find_angles(const std::vector<MovedTokens>& moved, const std::vector<double>& theta);

}  // namespace attnstore
