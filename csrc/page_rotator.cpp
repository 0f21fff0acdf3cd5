// SPDX-License-Identifier: Apache-2.0
#include "page_rotator.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "omp_team.h"

namespace attnstore {

namespace {

constexpr std::int64_t kShiftMax = std::int64_t{1} << 31;

// The runs [first, stop) are those of one block.
struct BlockRuns {
  std::int64_t block_id;
  std::size_t order;  // the first place in the caller's table
  std::size_t first;
  std::size_t stop;
};

// All blocks of all layers, taken one by one by whoever is free.
struct Batch {
  const BlockShape& shape;
  const PageShape& pages;
  const RotateBlock rotate_block;
  const std::vector<TokenRun>& runs;
  const std::vector<BlockRuns>& blocks;
  const std::size_t first_layer;
  const std::size_t num_jobs;
  std::atomic<std::size_t> next{0};
};

void fill_block(const Batch& batch, std::size_t job) {
  const std::size_t layer = batch.first_layer + job / batch.blocks.size();
  const BlockRuns& block = batch.blocks[job % batch.blocks.size()];
  const std::uint64_t slots = batch.pages.slots_base + layer * batch.pages.layer_bytes;
  const std::uint64_t target =
      batch.pages.layer_bases[layer] +
      static_cast<std::uint64_t>(block.block_id) * batch.pages.block_stride;
  batch.rotate_block(batch.shape, batch.runs.data() + block.first, block.stop - block.first,
                     reinterpret_cast<const std::byte*>(slots),
                     reinterpret_cast<std::byte*>(target));
}

// Several blocks that follow each other are one thread's, fewer towards the end: of the page that
// two blocks get tokens from it then has the second part in its cache.
void take_blocks(void* data) {
  constexpr std::size_t kBlocksMax = 8;
  Batch& batch = *static_cast<Batch*>(data);
  std::size_t first = batch.next;
  while (first < batch.num_jobs) {
    const std::size_t fair = (batch.num_jobs - first) / 16;
    const std::size_t stop = first + std::clamp(fair, std::size_t{1}, kBlocksMax);
    if (!batch.next.compare_exchange_weak(first, stop)) continue;
    for (std::size_t job = first; job < stop; ++job) fill_block(batch, job);
    first = batch.next;
  }
}

// For each shift but 0 the cosines of all pairs, and then the sines.
using Angles = std::map<std::int64_t, std::vector<float>>;

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

std::uint64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

void refuse(const std::string& why) { throw std::invalid_argument(why); }

}  // namespace

PageRotator::PageRotator(PageShape pages, RotationShape rotation, RotateBlock rotate_block)
    : pages_(std::move(pages)), rotation_(std::move(rotation)), rotate_block_(rotate_block) {
  check_shape(pages_);
  check_rotation();
  const auto tokens = static_cast<std::size_t>(rotation_.block_tokens);
  const auto dims = static_cast<std::size_t>(rotation_.head_dim);
  offsets_.reserve(2 * (tokens + dims));
  const auto offsets_of = [&](const ContentSide& side) {
    const std::int64_t* const at = offsets_.data() + offsets_.size();
    for (std::int64_t i = 0; i < rotation_.block_tokens; ++i) {
      offsets_.push_back(token_offset(side, i));
    }
    for (std::int64_t i = 0; i < rotation_.head_dim; ++i) offsets_.push_back(dim_offset(side, i));
    return SideOffsets{side, Order::kAny, false, at, at + tokens};
  };
  const SideOffsets key = offsets_of(rotation_.content.key);
  const SideOffsets value = offsets_of(rotation_.content.value);
  block_ = {key,
            value,
            rotation_.num_heads,
            rotation_.head_dim,
            rotation_.block_tokens,
            static_cast<std::int64_t>(rotation_.theta.size()),
            rotation_.pairing,
            rotation_.type,
            pages_.run_bytes,
            pages_.run_offsets.data()};
  find_orders(&block_);
}

void PageRotator::check_rotation() const {
  const RotationShape& shape = rotation_;
  if (shape.num_heads < 1 || shape.head_dim < 1 || shape.block_tokens < 1) {
    refuse("there are no heads, dims or tokens");
  }
  if (static_cast<std::int64_t>(2 * shape.theta.size()) > shape.head_dim) {
    refuse("more dims turn than a head has");
  }
  const std::uint64_t size = element_bytes(shape.type);
  const auto elements = static_cast<std::int64_t>(pages_.page_bytes / size);
  // Division first: none of the three is trusted yet.
  if (pages_.page_bytes % (2 * size) != 0 || shape.num_heads > elements ||
      shape.head_dim > elements || shape.block_tokens > elements ||
      2 * shape.num_heads * shape.head_dim != elements / shape.block_tokens ||
      elements % shape.block_tokens != 0) {
    refuse("K and V of the heads, tokens and dims are not a page");
  }
  if (pages_.run_bytes % size != 0) refuse("the runs of a page are not whole elements");
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

void PageRotator::check_moved(const std::vector<MovedTokens>& moved, LayerRange layers) const {
  check_copies(pages_, {}, layers);
  const std::int64_t block_tokens = rotation_.block_tokens;
  const std::int64_t chunk_tokens =
      static_cast<std::int64_t>(pages_.layer_bytes / pages_.page_bytes) * block_tokens;
  for (const MovedTokens& one : moved) {
    const bool inside = one.slot >= 0 && one.slot < pages_.num_slots && one.num_tokens > 0 &&
                        one.num_tokens <= block_tokens && one.first_in_chunk >= 0 &&
                        one.first_in_chunk <= chunk_tokens - one.num_tokens && one.block_id >= 0 &&
                        one.block_id < pages_.num_blocks && one.first_in_block >= 0 &&
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
  for (std::size_t i = 1; i < moved.size(); ++i) {  // in the order of their places
    const MovedTokens& before = moved[i - 1];
    const MovedTokens& one = moved[i];
    if (one.block_id == before.block_id &&
        one.first_in_block < before.first_in_block + before.num_tokens) {
      throw std::out_of_range("block id " + std::to_string(one.block_id) + ", token " +
                              std::to_string(one.first_in_block) + ": named twice");
    }
  }
}

void PageRotator::load(std::vector<MovedTokens> moved, LayerRange layers) const {
  std::map<std::int64_t, std::size_t> order;
  for (std::size_t i = 0; i < moved.size(); ++i) order.try_emplace(moved[i].block_id, i);
  std::sort(moved.begin(), moved.end(), [](const MovedTokens& a, const MovedTokens& b) {
    return std::pair(a.block_id, a.first_in_block) < std::pair(b.block_id, b.first_in_block);
  });
  check_moved(moved, layers);
  if (moved.empty() || layers.first == layers.stop) return;
  const Angles angles = find_angles(moved, rotation_.theta);
  std::vector<TokenRun> runs;
  std::vector<BlockRuns> blocks;
  for (const MovedTokens& one : moved) {
    if (blocks.empty() || blocks.back().block_id != one.block_id) {
      blocks.push_back({one.block_id, order[one.block_id], runs.size(), runs.size()});
    }
    const auto turn = angles.find(one.shift);
    const float* const turned = turn == angles.end() ? nullptr : turn->second.data();
    const std::int64_t stop = one.first_in_chunk + one.num_tokens;
    for (std::int64_t token = one.first_in_chunk; token < stop;) {
      const std::int64_t page = token / rotation_.block_tokens;
      const std::int64_t page_stop = std::min((page + 1) * rotation_.block_tokens, stop);
      runs.push_back({static_cast<std::uint64_t>(one.slot) * pages_.slot_bytes +
                          static_cast<std::uint64_t>(page) * pages_.page_bytes,
                      static_cast<std::int32_t>(token % rotation_.block_tokens),
                      static_cast<std::int32_t>(one.first_in_block + token - one.first_in_chunk),
                      static_cast<std::int32_t>(page_stop - token), turned});
      token = page_stop;
    }
    blocks.back().stop = runs.size();
  }
  // As the caller has them, which is the order of the source.
  std::sort(blocks.begin(), blocks.end(),
            [](const BlockRuns& a, const BlockRuns& b) { return a.order < b.order; });
  const auto first = static_cast<std::size_t>(layers.first);
  const auto stop = static_cast<std::size_t>(layers.stop);
  Batch batch{block_, pages_, rotate_block_, runs, blocks, first, (stop - first) * blocks.size()};
  on_omp_team(take_blocks, &batch);
}

}  // namespace attnstore
