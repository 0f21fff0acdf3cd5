// SPDX-License-Identifier: Apache-2.0
#include "rotate/moved_tokens.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace attnstore {

namespace {

constexpr std::int64_t kShiftMax = std::int64_t{1} << 31;

void refuse(const std::string& why) { throw std::invalid_argument(why); }

}  // namespace

void check_rotation(const PageShape& pages, const RotationShape& shape) {
  if (shape.num_heads < 1 || shape.head_dim < 1 || shape.block_tokens < 1) {
    refuse("there are no heads, dims or tokens");
  }
  if (static_cast<std::int64_t>(2 * shape.theta.size()) > shape.head_dim) {
    refuse("more dims turn than a head has");
  }
  const std::uint64_t size = element_bytes(shape.type);
  const auto elements = static_cast<std::int64_t>(pages.page_bytes / size);
  // Division first: none of the three is trusted yet.
  if (pages.page_bytes % (2 * size) != 0 || shape.num_heads > elements ||
      shape.head_dim > elements || shape.block_tokens > elements ||
      2 * shape.num_heads * shape.head_dim != elements / shape.block_tokens ||
      elements % shape.block_tokens != 0) {
    refuse("K and V of the heads, tokens and dims are not a page");
  }
  if (pages.run_bytes % size != 0) refuse("the runs of a page are not whole elements");
  std::vector<bool> is_taken(static_cast<std::size_t>(elements));
  for (const ContentSide* side : {&shape.content.key, &shape.content.value}) {
    if (side->token_group < 1 || side->dim_group < 1) refuse("a group has no tokens or dims");
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
      for (std::int64_t token = 0; token < shape.block_tokens; ++token) {
        const std::int64_t at = side->base + head * side->head_step + token_offset(*side, token);
        for (std::int64_t dim = 0; dim < shape.head_dim; ++dim) {
          const std::int64_t offset = at + dim_offset(*side, dim);
          if (offset < 0 || offset >= elements) refuse("an element is not within its page");
          if (is_taken[static_cast<std::size_t>(offset)]) refuse("two elements are at one place");
          is_taken[static_cast<std::size_t>(offset)] = true;
        }
      }
    }
  }
}

void sort_by_place(std::vector<MovedTokens>* moved) {
  std::sort(moved->begin(), moved->end(), [](const MovedTokens& a, const MovedTokens& b) {
    return std::pair(a.block_id, a.first_in_block) < std::pair(b.block_id, b.first_in_block);
  });
}

void check_moved(const PageShape& pages, const RotationShape& rotation,
                 const std::vector<MovedTokens>& moved, LayerRange layers) {
  check_copies(pages, {}, layers);
  const std::int64_t block_tokens = rotation.block_tokens;
  const std::int64_t chunk_tokens =
      static_cast<std::int64_t>(pages.layer_bytes / pages.page_bytes) * block_tokens;
  for (const MovedTokens& one : moved) {
    const bool inside = one.slot >= 0 && one.slot < pages.num_slots && one.num_tokens > 0 &&
                        one.num_tokens <= block_tokens && one.first_in_chunk >= 0 &&
                        one.first_in_chunk <= chunk_tokens - one.num_tokens && one.block_id >= 0 &&
                        one.block_id < pages.num_blocks && one.first_in_block >= 0 &&
                        one.first_in_block <= block_tokens - one.num_tokens &&
                        one.shift > -kShiftMax && one.shift < kShiftMax;
    if (!inside) {
      throw std::out_of_range(
          "slot " + std::to_string(one.slot) + ", " + std::to_string(one.num_tokens) +
          " tokens from " + std::to_string(one.first_in_chunk) + " of the chunk, block id " +
          std::to_string(one.block_id) + " from token " + std::to_string(one.first_in_block) +
          ", shift " + std::to_string(one.shift) + ": one of them does not exist");
    }
  }
  for (std::size_t i = 1; i < moved.size(); ++i) {
    const MovedTokens& before = moved[i - 1];
    const MovedTokens& one = moved[i];
    if (one.block_id == before.block_id &&
        one.first_in_block < before.first_in_block + before.num_tokens) {
      throw std::out_of_range("block id " + std::to_string(one.block_id) + ", token " +
                              std::to_string(one.first_in_block) + ": named twice");
    }
  }
}

Angles find_angles(const std::vector<MovedTokens>& moved, const std::vector<double>& theta) {
  Angles angles;
  for (const MovedTokens& tokens : moved) {
    if (tokens.shift == 0 || theta.empty()) continue;
    std::vector<float>& turn = angles[tokens.shift];
    if (!turn.empty()) continue;
    const auto shift = static_cast<double>(tokens.shift);
    for (const double step : theta) turn.push_back(static_cast<float>(std::cos(shift * step)));
    for (const double step : theta) turn.push_back(static_cast<float>(std::sin(shift * step)));
  }
  return angles;
}

}  // namespace attnstore
