// SPDX-License-Identifier: Apache-2.0
// A part of rotate_body.h: V in tiles of one line, 2 tokens by 16 dims: a word is one dim, of the
// tokens 2 i (low half) and 2 i + 1.

namespace attnstore {
namespace ATTNSTORE_PROCESSOR {
namespace {

// Tiles whose first token is the second one of a tile of the source.
__attribute__((noinline)) void put_odd_tiles(std::uint16_t* target, const std::uint16_t* source,
                                             std::int64_t num_tiles, Ahead* ahead) {
  const auto* words = reinterpret_cast<const Word*>(source);
  for (std::int64_t j = 0; j < num_tiles; ++j, words += kWords, target += 2 * kWords) {
    alignas(kLine) Word tile[kWords];
    for (std::int64_t i = 0; i < kWords; ++i) tile[i] = words[i] >> 16 | words[i + kWords] << 16;
    put(target, tile, sizeof(tile));
    ahead->fetch(1);
  }
}

// Half of a tile: the first or the second of its two tokens.
inline void copy_half(std::uint16_t* target, const std::uint16_t* source) {
  for (std::int64_t i = 0; i < 2 * kWords; i += 2) target[i] = source[i];
}

// One group of dims of one head.
template <typename Element>
inline void value_group(const Job<Element>& job, std::int64_t at) {
  constexpr std::int64_t kTile = 2 * kWords;  // in elements
  auto* const target = job.target(at);
  const auto half = [](std::int64_t token) { return token / 2 * kTile + token % 2; };
  for (std::size_t i = 0; i < job.num_runs; ++i) {
    const TokenRun& run = job.runs[i];
    const auto* const source = job.source(run) + at;
    const std::int64_t odd = run.target % 2;  // tokens before the first whole tile
    const std::int64_t num_tiles = (run.count - odd) / 2;
    const std::int64_t from = run.source + odd;
    auto* const to = target + (run.target + odd) / 2 * kTile;
    if (from % 2 == 0) {
      put_long(to, source + from / 2 * kTile,
               num_tiles * kTile * static_cast<std::int64_t>(sizeof(std::uint16_t)), job.ahead);
    } else {
      put_odd_tiles(to, source + from / 2 * kTile, num_tiles, job.ahead);
    }
    // A tile that is shared with the run before, or with a token that stays as it is.
    if (odd != 0) {
      const bool is_done = i > 0 && job.runs[i - 1].target + job.runs[i - 1].count == run.target;
      if (!is_done) copy_half(target + half(run.target), source + half(run.source));
    }
    const std::int64_t last = run.count - 1;
    if ((run.target + last) % 2 == 0) {
      const auto* const first_half = source + half(run.source + last);
      auto* const tile = target + half(run.target + last);
      if (i + 1 < job.num_runs && job.runs[i + 1].target == run.target + run.count) {
        alignas(64) std::uint16_t both[kTile];
        copy_half(both, first_half);
        copy_half(both + 1, job.source(job.runs[i + 1]) + at + half(job.runs[i + 1].source));
        put(tile, both, sizeof(both));
      } else {
        copy_half(tile, first_half);
      }
    }
  }
}

template <typename Element>
void value_tiles(const Job<Element>& job, std::int64_t at) {
  for (std::int64_t group = 0; group < job.shape.head_dim / kWords; ++group) {
    value_group(job, at + group * job.shape.value.side.dim_outer);
  }
}

}  // namespace
}  // namespace ATTNSTORE_PROCESSOR
}  // namespace attnstore
