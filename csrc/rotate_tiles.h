// SPDX-License-Identifier: Apache-2.0
// A part of rotate_body.h: K and V in tiles of one line, as matrix units read them. A *word* is two
// elements.
//
//   K   16 tokens by 2 dims: word t has the dims 2 j (low half) and 2 j + 1 of the group's token t
//   V   2 tokens by 16 dims: word d has the tokens 2 i (low half) and 2 i + 1 of dim d

namespace attnstore {
namespace ATTNSTORE_PROCESSOR {
namespace {

constexpr std::int64_t kWords = 16;

// Some of the tokens of a tile of the block, of one group of a page.
struct TilePart {
  const Word* words;    // of tile 0, the first that is wanted
  std::int64_t within;  // that word's place in its tile
  std::int64_t first;   // its place in the block's tile
  std::int64_t count;
};

// The tokens [first, stop) of a group of the block, which turn alike.
struct TileParts {
  TilePart parts[kWords];
  std::size_t num_parts;
  const float* angles;
  std::int64_t first;
  std::int64_t stop;
};

// Where the tokens from `*token` on come from, until the end of their group, a gap, or another
// rotation. Run `*i` has the token; both go on to what comes next.
template <typename Element>
inline void find_parts(const Job<Element>& job, std::int64_t at, std::size_t* i,
                       std::int64_t* token, TileParts* tile) {
  const std::int64_t group = *token / kTileTokens * kTileTokens;
  std::int64_t next = *token;
  tile->num_parts = 0;
  tile->angles = job.runs[*i].angles;
  tile->first = next - group;
  for (;;) {
    const TokenRun& run = job.runs[*i];
    const std::int64_t run_stop = run.target + run.count;
    const std::int64_t stop = run_stop < group + kTileTokens ? run_stop : group + kTileTokens;
    while (next < stop) {
      const std::int64_t from = run.source + next - run.target;
      const std::int64_t left = kTileTokens - from % kTileTokens;
      const std::int64_t count = left < stop - next ? left : stop - next;
      const auto* const words = reinterpret_cast<const Word*>(
          job.source(run) + at + from / kTileTokens * job.shape.key.side.token_outer);
      tile->parts[tile->num_parts++] = {words + from % kTileTokens, from % kTileTokens,
                                        next - group, count};
      next += count;
    }
    tile->stop = next - group;
    *token = next;
    if (next < run_stop) return;
    if (++*i == job.num_runs) return;
    *token = job.runs[*i].target;
    if (*token != next || next == group + kTileTokens || job.runs[*i].angles != tile->angles) {
      return;
    }
  }
}

// Puts one tile together from its parts; `offset` is the tile's, in words.
inline void gather_tile(const TileParts& tile, std::int64_t offset, Word* words) {
#if defined(ATTNSTORE_AVX512)
  // Whole lines, not masked ones that begin within a line: those wait for stores to other pages
  // that have the same place in theirs.
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i all = _mm512_setzero_si512();
  for (std::size_t i = 0; i < tile.num_parts; ++i) {
    const TilePart& part = tile.parts[i];
    const __m512i line = _mm512_loadu_si512(part.words - part.within + offset);
    const __m512i order =
        _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(part.within - part.first)));
    const auto mask = static_cast<__mmask16>(((1U << part.count) - 1U) << part.first);
    all = _mm512_mask_permutexvar_epi32(all, mask, order, line);
  }
  _mm512_store_si512(words, all);
#else
  for (std::size_t i = 0; i < tile.num_parts; ++i) {
    const TilePart& part = tile.parts[i];
    __builtin_memcpy(words + part.first, part.words + offset,
                     static_cast<std::size_t>(part.count) * sizeof(Word));
  }
#endif
}

// All tiles of one group of tokens and one head; those that `next` is made of are fetched.
template <typename Element>
inline void key_group(const BlockShape& shape, const TileParts& tile, const TileParts& next,
                      Word* target) {
  alignas(64) Word x[2][kWords] = {};
  alignas(64) Word y[2][kWords];
  const Word* const ahead =
      next.num_parts == 0 ? tile.parts[0].words : next.parts[next.num_parts - 1].words;
  const auto put_tile = [&](std::int64_t offset, const Word* words) {
    put(target + offset + tile.first, words + tile.first,
        static_cast<std::size_t>(tile.stop - tile.first) * sizeof(Word));
  };
  const std::int64_t step = shape.key.side.dim_outer / 2;
  const float* const cosines = tile.angles;
  const std::int64_t pairs = cosines == nullptr ? 0 : shape.num_pairs;
  const float* const sines = cosines + pairs;
  if (shape.pairing == Pairing::kNeox) {
    for (std::int64_t j = 0; j < pairs / 2; ++j) {
      const std::int64_t one = j * step;
      const std::int64_t two = (j + pairs / 2) * step;
      __builtin_prefetch(ahead + one);
      __builtin_prefetch(ahead + two);
      gather_tile(tile, one, x[0]);
      gather_tile(tile, two, x[1]);
      rotate_words<Element>(x[0], x[1], y[0], y[1], kWords, cosines + 2 * j, sines + 2 * j);
      put_tile(one, y[0]);
      put_tile(two, y[1]);
    }
  } else {
    for (std::int64_t j = 0; j < pairs; ++j) {
      __builtin_prefetch(ahead + j * step);
      gather_tile(tile, j * step, x[0]);
      rotate_pairs<Element>(x[0], y[0], kWords, cosines[j], sines[j]);
      put_tile(j * step, y[0]);
    }
  }
  for (std::int64_t j = pairs; j < shape.head_dim / 2; ++j) {
    gather_tile(tile, j * step, x[0]);
    put_tile(j * step, x[0]);
  }
}

template <typename Element>
void key_tiles(const Job<Element>& job, std::int64_t at) {
  const std::int64_t outer = job.shape.key.side.token_outer;
  auto* const target = job.target(at);
  TileParts tiles[2];
  std::size_t run = 0;
  std::int64_t token = job.runs[0].target;
  std::int64_t group = token / kTileTokens;
  find_parts(job, at, &run, &token, &tiles[0]);
  for (int now = 0; tiles[now].num_parts != 0; now = 1 - now) {
    TileParts& next = tiles[1 - now];
    const std::int64_t next_group = token / kTileTokens;
    if (run < job.num_runs) {
      find_parts(job, at, &run, &token, &next);
    } else {
      next.num_parts = 0;
    }
    key_group<Element>(job.shape, tiles[now], next,
                       reinterpret_cast<Word*>(target + group * outer));
    group = next_group;
  }
}

template <typename Element>
void fetch_key_tiles(const Job<Element>& job, std::int64_t at) {
  const std::int64_t step = job.shape.key.side.dim_outer / 2;
  TileParts tile;
  std::size_t run = 0;
  std::int64_t token = job.runs[0].target;
  find_parts(job, at, &run, &token, &tile);
  for (std::size_t i = 0; i < tile.num_parts; ++i) {
    for (std::int64_t j = 0; j < job.shape.head_dim / 2; ++j) {
      __builtin_prefetch(tile.parts[i].words + j * step);
    }
  }
}

// Tiles whose first token is the second one of a tile of the source.
__attribute__((noinline)) void put_odd_tiles(std::uint16_t* target, const std::uint16_t* source,
                                             std::int64_t num_tiles) {
  alignas(64) Word tile[kWords];
  const auto* words = reinterpret_cast<const Word*>(source);
  for (std::int64_t j = 0; j < num_tiles; ++j, words += kWords, target += 2 * kWords) {
    for (std::int64_t i = 0; i < kWords; ++i) tile[i] = words[i] >> 16 | words[i + kWords] << 16;
    put(target, tile, sizeof(tile));
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
      put(to, source + from / 2 * kTile,
          static_cast<std::size_t>(num_tiles * kTile) * sizeof(std::uint16_t));
    } else {
      put_odd_tiles(to, source + from / 2 * kTile, num_tiles);
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
