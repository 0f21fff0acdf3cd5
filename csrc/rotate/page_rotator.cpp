// SPDX-License-Identifier: Apache-2.0
#include "rotate/page_rotator.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "copy/omp_team.h"

namespace attnstore {

namespace {

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
  const std::size_t num_threads;
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
// two blocks get tokens from it then has the second part in its cache. The first of them has not.
void take_blocks(void* data) {
  constexpr std::size_t kBlocksMax = 16;
  Batch& batch = *static_cast<Batch*>(data);
  std::size_t first = batch.next;
  while (first < batch.num_jobs) {
    const std::size_t fair = (batch.num_jobs - first) / (3 * batch.num_threads);
    const std::size_t stop = first + std::clamp(fair, std::size_t{1}, kBlocksMax);
    if (!batch.next.compare_exchange_weak(first, stop)) continue;
    for (std::size_t job = first; job < stop; ++job) fill_block(batch, job);
    first = batch.next;
  }
}

}  // namespace

PageRotator::PageRotator(PageShape pages, RotationShape rotation, RotateBlock rotate_block)
    : pages_(std::move(pages)), rotation_(std::move(rotation)), rotate_block_(rotate_block) {
  check_shape(pages_);
  check_rotation(pages_, rotation_);
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

void PageRotator::load(std::vector<MovedTokens> moved, LayerRange layers) const {
  std::map<std::int64_t, std::size_t> order;
  for (std::size_t i = 0; i < moved.size(); ++i) order.try_emplace(moved[i].block_id, i);
  sort_by_place(&moved);
  check_moved(pages_, rotation_, moved, layers);
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
  Batch batch{block_,
              pages_,
              rotate_block_,
              runs,
              blocks,
              first,
              (stop - first) * blocks.size(),
              static_cast<std::size_t>(omp_team_size())};
  on_omp_team(take_blocks, &batch);
}

}  // namespace attnstore
