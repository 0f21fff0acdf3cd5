// SPDX-License-Identifier: Apache-2.0
#include "cuda/rotate_jobs.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <stdexcept>

namespace attnstore {

namespace {

constexpr std::uint64_t kAlignment = 16;

std::uint64_t round_up(std::uint64_t number, std::uint64_t step) {
  return (number + step - 1) / step * step;
}

// Floats from one turn to the next.
std::uint64_t angle_stride(const RotationShape& rotation) {
  return round_up(2 * rotation.theta.size(), kAlignment / sizeof(float));
}

RowItems row_items(std::uint64_t num_dims, std::uint64_t turning_dims, std::uint32_t lanes) {
  const auto words = static_cast<std::uint32_t>(num_dims / lanes);
  const auto turning = static_cast<std::uint32_t>(turning_dims / lanes);
  const std::uint32_t num_turning = (turning + 1) / 2;
  return {num_turning, num_turning + (words - turning + 1) / 2, turning, words};
}

}  // namespace

std::uint64_t MoveTable::angles_at() const {
  return round_up(num_tokens * sizeof(TokenMove), kAlignment);
}

void check_sizes(const PageShape& pages) {
  constexpr std::uint64_t kMax = 1ULL << 31;
  if (pages.page_bytes > kMax || static_cast<std::uint64_t>(pages.num_slots) > kMax ||
      static_cast<std::uint64_t>(pages.num_blocks) > kMax ||
      pages.layer_bytes / pages.page_bytes > kMax) {
    throw std::invalid_argument("pages are too large or too many to be moved by token");
  }
}

bool has_wide_words(const PageShape& pages, const RotationShape& rotation) {
  if (word_bytes(pages, Place::kSlot, Place::kBlock) != sizeof(Word16)) return false;
  const auto lanes = static_cast<std::int64_t>(sizeof(Word16)) /
                     static_cast<std::int64_t>(element_bytes(rotation.type));
  const auto pairs = static_cast<std::int64_t>(rotation.theta.size());
  const std::int64_t turning = rotation.pairing == Pairing::kNeox ? pairs : 2 * pairs;
  if (rotation.head_dim % lanes != 0 || turning % lanes != 0) return false;
  for (const ContentSide* side : {&rotation.content.key, &rotation.content.value}) {
    if (side->dim_group < rotation.head_dim || side->dim_inner != 1) return false;
    for (const std::int64_t step :
         {side->base, side->head_step, side->token_outer, side->token_inner}) {
      if (step % lanes != 0) return false;
    }
  }
  return true;
}

MoveTable make_move_table(const RotationShape& rotation, const std::vector<MovedTokens>& moved) {
  const Angles angles = find_angles(moved, rotation.theta);
  std::map<std::int64_t, std::uint32_t> turns;
  for (const auto& angle : angles) {
    turns.emplace(angle.first, static_cast<std::uint32_t>(turns.size()));
  }
  std::vector<TokenMove> tokens;
  for (const MovedTokens& one : moved) {
    const auto turn = turns.find(one.shift);
    for (std::int64_t i = 0; i < one.num_tokens; ++i) {
      const std::int64_t source = one.first_in_chunk + i;
      tokens.push_back({static_cast<std::uint32_t>(one.slot),
                        static_cast<std::uint32_t>(source / rotation.block_tokens),
                        static_cast<std::uint32_t>(source % rotation.block_tokens),
                        static_cast<std::uint32_t>(one.block_id),
                        static_cast<std::uint32_t>(one.first_in_block + i),
                        turn == turns.end() ? kNoTurn : turn->second});
    }
  }
  MoveTable table{{}, static_cast<std::uint32_t>(tokens.size())};
  const std::uint64_t stride = angle_stride(rotation) * sizeof(float);
  table.words.resize((table.angles_at() + angles.size() * stride) / sizeof(std::int64_t));
  auto* const bytes = reinterpret_cast<std::byte*>(table.words.data());
  std::memcpy(bytes, tokens.data(), tokens.size() * sizeof(TokenMove));
  std::byte* at = bytes + table.angles_at();
  for (const auto& angle : angles) {
    std::memcpy(at, angle.second.data(), angle.second.size() * sizeof(float));
    at += stride;
  }
  return table;
}

std::vector<RotateJob> make_rotate_jobs(const PageMap& map, const RotationShape& rotation,
                                        bool is_wide, const MoveTable& words, std::uint64_t table,
                                        LayerRange layers, std::uint32_t items_max) {
  const std::uint32_t lanes = is_wide ? sizeof(Word16) / element_bytes(rotation.type) : 1;
  const auto dims = static_cast<std::uint64_t>(rotation.head_dim);
  RotateJob job = {};
  job.map = map;
  job.content = rotation.content;
  job.key = row_items(dims, 2 * rotation.theta.size(), lanes);
  job.value = row_items(dims, 0, lanes);
  job.pairing = rotation.pairing;
  job.word_pairing = is_wide ? Pairing::kNeox : rotation.pairing;
  job.angle_stride = static_cast<std::uint32_t>(angle_stride(rotation));
  job.num_pairs = static_cast<std::uint32_t>(rotation.theta.size());
  job.angles = reinterpret_cast<const float*>(table + words.angles_at());
  job.items_per_token =
      static_cast<std::uint32_t>(rotation.num_heads) * (job.key.num_items + job.value.num_items);
  if (job.items_per_token > items_max) {
    throw std::invalid_argument("a token is too large for one job");
  }
  const auto* const tokens = reinterpret_cast<const TokenMove*>(table);
  const std::uint32_t tokens_max = items_max / job.items_per_token;
  const std::uint32_t tokens_at_once = std::min(words.num_tokens, tokens_max);
  // Whole layers go together as long as all their tokens fit.
  const std::int64_t layers_at_once = std::max(1U, tokens_max / words.num_tokens);
  std::vector<RotateJob> jobs;
  for (std::int64_t layer = layers.first; layer < layers.stop; layer += layers_at_once) {
    const std::int64_t num_layers = std::min(layers_at_once, layers.stop - layer);
    for (std::uint32_t first = 0; first < words.num_tokens; first += tokens_at_once) {
      job.tokens = tokens + first;
      job.num_tokens = std::min(tokens_at_once, words.num_tokens - first);
      job.first_layer = static_cast<std::uint32_t>(layer);
      job.num_items = static_cast<std::uint32_t>(num_layers) * job.num_tokens * job.items_per_token;
      jobs.push_back(job);
    }
  }
  return jobs;
}

}  // namespace attnstore
