// SPDX-License-Identifier: Apache-2.0
// A part of rotate_body.h: K whose tokens stand side by side, dim by dim (kTokens), or in tiles of
// 16 tokens by 2 dims (kTiles). Both are lines of 64 bytes: 32 or 16 tokens of one dim, or a tile,
// of which each token is a word of two elements. A line of the block is put together from what the
// source has at another alignment, turned, and stored as a whole.

namespace attnstore {
namespace ATTNSTORE_PROCESSOR {
namespace {

constexpr std::size_t kSpansMax = 64;

// Tokens of one line of the block that turn alike: of one place in the slots, or of two that follow
// each other. What it says holds for all lines of a head that have these tokens, and for all heads;
// addresses are those of a line at offset 0.
struct Span {
  const std::byte* source[2];  // where the line would begin if all of it came from there
  std::uint32_t
      halves[2];        // which of the line's 32 half words come from there; not 0 for the first
  std::uint32_t first;  // of the line, in bytes
  std::uint32_t stop;
  std::int64_t target;  // where the line is in the block, in bytes
  const float* angles;
  bool begins_row;  // it and those behind it are kAtOnce whole lines, side by side, that turn alike
};

// Lines that are done together, where that is done by hand.
constexpr std::size_t kAtOnce = 4;

struct Spans {
  Span spans[kSpansMax];
  std::size_t count;
};

// How tokens lie in lines.
struct LineShape {
  std::int64_t tokens;       // of a line
  std::int64_t token_bytes;  // in it
  std::int64_t outer_bytes;  // from the line of some tokens to that of the next ones
};

template <typename Element>
inline LineShape line_shape(const BlockShape& shape) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(typename Element::Bits));
  if (shape.key.order == Order::kTiles) {
    return {kTileTokens, 2 * kBytes, shape.key.side.token_outer * kBytes};
  }
  return {64 / kBytes, kBytes, 64};
}

inline std::uint32_t halves_of(std::int64_t first_byte, std::int64_t stop_byte) {
  const auto below = [](std::int64_t bytes) { return (std::uint64_t{1} << (bytes / 2)) - 1; };
  return static_cast<std::uint32_t>(below(stop_byte) & ~below(first_byte));
}

inline bool is_whole(const Span& span) {
  return span.first == 0 && span.stop == kLine && span.angles != nullptr;
}

// Cuts what is left of the runs into spans, as many as there is room for. Run `*i` is the first of
// them, and `*token` the first token of the block that is left; both go on.
template <typename Element>
void find_spans(const Job<Element>& job, std::size_t* i, std::int64_t* token, Spans* found) {
  const LineShape line = line_shape<Element>(job.shape);
  const bool is_tile = job.shape.key.order == Order::kTiles;
  std::size_t count = 0;
  std::size_t parts = 2;  // of the last span
  while (*i < job.num_runs && count < kSpansMax) {
    const TokenRun& run = job.runs[*i];
    if (*token < run.target) *token = run.target;
    const std::int64_t place = *token % line.tokens;
    const std::int64_t from = run.source + *token - run.target;
    // Tokens are contiguous as far as a line of the block goes, and, in tiles, one of the source.
    std::int64_t length = run.target + run.count - *token;
    if (length > line.tokens - place) length = line.tokens - place;
    std::int64_t source = from * line.token_bytes;
    if (is_tile) {
      const std::int64_t left = line.tokens - from % line.tokens;
      if (length > left) length = left;
      source = from / line.tokens * line.outer_bytes + from % line.tokens * line.token_bytes;
    }
    const std::int64_t first = place * line.token_bytes;
    const std::int64_t stop = first + length * line.token_bytes;
    const std::byte* const begin = job.slots + run.page + source - first;
    const std::int64_t target = *token / line.tokens * line.outer_bytes;
    Span* const last = count == 0 ? nullptr : &found->spans[count - 1];
    const bool continues = last != nullptr && parts == 1 && last->target == target &&
                           last->stop == first && last->angles == run.angles;
    if (continues) {
      last->source[1] = begin;
      last->halves[1] = halves_of(first, stop);
      last->stop = static_cast<std::uint32_t>(stop);
      parts = 2;
    } else {
      found->spans[count++] = {{begin, begin},
                               {halves_of(first, stop), 0},
                               static_cast<std::uint32_t>(first),
                               static_cast<std::uint32_t>(stop),
                               target,
                               run.angles,
                               false};
      parts = 1;
    }
    *token += length;
    if (*token == run.target + run.count) ++*i;
  }
  found->count = count;
  for (std::size_t k = 0; k + kAtOnce <= count; ++k) {
    Span* const row = &found->spans[k];
    row->begins_row = true;
    for (std::size_t n = 0; n < kAtOnce; ++n) {
      row->begins_row &= is_whole(row[n]) && row[n].angles == row->angles &&
                         row[n].target == row->target + static_cast<std::int64_t>(n * kLine);
    }
  }
}

// Puts one line together; `offset` is the line's, in bytes.
inline void gather_line(const Span& span, std::int64_t offset, Word* line) {
#if defined(ATTNSTORE_AVX512)
  // What a mask leaves out is not read.
  const __m512i first = _mm512_maskz_loadu_epi16(span.halves[0], span.source[0] + offset);
  _mm512_store_si512(line, _mm512_mask_loadu_epi16(first, span.halves[1], span.source[1] + offset));
#else
  auto* const bytes = reinterpret_cast<std::byte*>(line);
  if (span.halves[0] == 0xFFFFFFFFU) {
    __builtin_memcpy(bytes, span.source[0] + offset, kLine);
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t halves = span.halves[i];
    if (halves == 0) break;
    const auto first = static_cast<std::size_t>(__builtin_ctz(halves)) * 2;
    const auto stop = static_cast<std::size_t>(32 - __builtin_clz(halves)) * 2;
    __builtin_memcpy(bytes + first, span.source[i] + offset + first, stop - first);
  }
#endif
}

inline void put_line(const Span& span, std::byte* target, std::int64_t offset, const Word* line) {
  put(target + span.target + offset + span.first,
      reinterpret_cast<const std::byte*>(line) + span.first, span.stop - span.first);
}

// One line of each of a pair's dims. In a tile of NeoX two pairs are side by side.
template <typename Element>
inline void turn_two_lines(const Span& span, std::byte* target, std::int64_t one, std::int64_t two,
                           const float* cosines, const float* sines) {
  alignas(64) Word x[2][16] = {};  // where no token is, a number that is quick to turn
  alignas(64) Word y[2][16];
  gather_line(span, one, x[0]);
  gather_line(span, two, x[1]);
  if constexpr (sizeof(typename Element::Bits) == 2) {
    rotate_words<Element>(x[0], x[1], y[0], y[1], cosines, sines);
  } else {
    for (int i = 0; i < 16; ++i) {
      std::uint32_t first = 0;
      std::uint32_t second = 0;
      rotate_pair<Element>(x[0][i], x[1][i], cosines[0], sines[0], &first, &second);
      y[0][i] = first;
      y[1][i] = second;
    }
  }
  put_line(span, target, one, y[0]);
  put_line(span, target, two, y[1]);
}

inline void copy_line(const Span& span, std::byte* target, std::int64_t offset) {
  alignas(64) Word line[16] = {};
  gather_line(span, offset, line);
  put_line(span, target, offset, line);
}

// Where whole lines are turned in registers: kAtOnce pairs of lines, all of which are loaded before
// the first one is stored.

template <typename Element>
constexpr bool kInRegisters = false;

template <typename Element>
void turn_row(const Span* spans, std::byte* target, std::int64_t one, std::int64_t two,
              float cosine, float sine);

template <typename Element>
void turn_tiles(const Span& span, std::byte* target, std::int64_t one, std::int64_t two,
                const float* cosines, const float* sines);

#if defined(ATTNSTORE_AVX512_BF16)
template <>
constexpr bool kInRegisters<Bfloat16> = true;

ATTNSTORE_ALWAYS_INLINE __m512i load_line(const Span& span, std::int64_t offset) {
  if (__builtin_expect(span.halves[1] == 0, 1)) return _mm512_loadu_si512(span.source[0] + offset);
  const __m512i first = _mm512_maskz_loadu_epi16(span.halves[0], span.source[0] + offset);
  return _mm512_mask_loadu_epi16(first, span.halves[1], span.source[1] + offset);
}

ATTNSTORE_ALWAYS_INLINE void store_lines(std::byte* target, const __m512i* lines) {
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i * kLine), lines[i]);
  }
}

// Lines of two dims.
template <>
ATTNSTORE_ALWAYS_INLINE void turn_row<Bfloat16>(const Span* spans, std::byte* target,
                                                std::int64_t one, std::int64_t two, float cosine,
                                                float sine) {
  const float cosines[] = {cosine, cosine};
  const float sines[] = {sine, sine};
  const WordAngles angles(cosines, sines);
  __m512i x[2][kAtOnce];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    x[0][i] = load_line(spans[i], one);
    x[1][i] = load_line(spans[i], two);
  }
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kAtOnce; ++i) turn_words(&x[0][i], &x[1][i], angles);
  store_lines(target + spans->target + one, x[0]);
  store_lines(target + spans->target + two, x[1]);
}

// Tiles of one span, which stand side by side.
template <>
ATTNSTORE_ALWAYS_INLINE void turn_tiles<Bfloat16>(const Span& span, std::byte* target,
                                                  std::int64_t one, std::int64_t two,
                                                  const float* cosines, const float* sines) {
  __m512i x[2][kAtOnce];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    x[0][i] = load_line(span, one + static_cast<std::int64_t>(i * kLine));
    x[1][i] = load_line(span, two + static_cast<std::int64_t>(i * kLine));
  }
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kAtOnce; ++i) {
    turn_words(&x[0][i], &x[1][i], WordAngles(cosines + 2 * i, sines + 2 * i));
  }
  store_lines(target + span.target + one, x[0]);
  store_lines(target + span.target + two, x[1]);
}
#endif

inline bool is_aligned(const std::byte* target, std::int64_t step) {
  return ((reinterpret_cast<std::uintptr_t>(target) | static_cast<std::uintptr_t>(step)) % kLine) ==
         0;
}

// K of one head, dim by dim. `at` is the head's, in bytes; `target` is where it is in the block.
template <typename Element>
void key_rows(const BlockShape& shape, const Spans& found, std::int64_t at, std::byte* target,
              Ahead* ahead) {
  const std::int64_t step =
      shape.key.side.dim_inner * static_cast<std::int64_t>(sizeof(typename Element::Bits));
  const std::int64_t pairs = shape.num_pairs;
  std::byte* const to = target - at;
  [[maybe_unused]] const bool rows_are_lines = is_aligned(target, step);
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const DimPair dims = pair_dims(shape.pairing, pairs, pair);
    const std::int64_t one = at + dims.first * step;
    const std::int64_t two = at + dims.second * step;
    ahead->fetch(2 * static_cast<std::int64_t>(found.count));
    for (std::size_t i = 0; i < found.count; ++i) {
      const Span& span = found.spans[i];
      if (span.angles == nullptr) {
        copy_line(span, to, one);
        copy_line(span, to, two);
        continue;
      }
      const float cosines[] = {span.angles[pair], span.angles[pair]};
      const float sines[] = {span.angles[pairs + pair], span.angles[pairs + pair]};
      if constexpr (kInRegisters<Element>) {
        if (span.begins_row && rows_are_lines) {
          turn_row<Element>(&span, to, one, two, cosines[0], sines[0]);
          i += kAtOnce - 1;
          continue;
        }
      }
      turn_two_lines<Element>(span, to, one, two, cosines, sines);
    }
  }
  for (std::int64_t dim = 2 * pairs; dim < shape.head_dim; ++dim) {
    for (std::size_t i = 0; i < found.count; ++i) copy_line(found.spans[i], to, at + dim * step);
  }
}

// NeoX pairs of one span of tiles, two in a tile.
template <typename Element>
void key_tile_pairs(const Span& span, std::byte* target, std::int64_t at, std::int64_t step,
                    std::int64_t pairs, Ahead* ahead) {
  const float* const cosines = span.angles;
  const float* const sines = cosines + pairs;
  const std::int64_t num_tiles = pairs / 2;
  std::int64_t j = 0;
  if constexpr (kInRegisters<Element>) {
    constexpr auto kTiles = static_cast<std::int64_t>(kAtOnce);
    const bool is_row =
        is_whole(span) && step == kLine && is_aligned(target + at + span.target, step);
    for (; is_row && j + kTiles <= num_tiles; j += kTiles) {
      ahead->fetch(2 * kTiles);
      turn_tiles<Element>(span, target, at + j * step, at + (j + num_tiles) * step, cosines + 2 * j,
                          sines + 2 * j);
    }
  }
  for (; j < num_tiles; ++j) {
    ahead->fetch(2);
    turn_two_lines<Element>(span, target, at + j * step, at + (j + num_tiles) * step,
                            cosines + 2 * j, sines + 2 * j);
  }
}

// K of one head, tile by tile.
template <typename Element>
void key_tiles(const BlockShape& shape, const Spans& found, std::int64_t at, std::byte* target,
               Ahead* ahead) {
  const std::int64_t step = shape.key.side.dim_outer * 2;
  for (std::size_t i = 0; i < found.count; ++i) {
    const Span& span = found.spans[i];
    std::byte* const to = target - at;
    const std::int64_t pairs = span.angles == nullptr ? 0 : shape.num_pairs;
    if (shape.pairing == Pairing::kNeox) {
      key_tile_pairs<Element>(span, to, at, step, pairs, ahead);
    } else {
      for (std::int64_t j = 0; j < pairs; ++j) {
        alignas(64) Word x[16] = {};
        alignas(64) Word y[16];
        ahead->fetch(1);
        gather_line(span, at + j * step, x);
        rotate_pairs<Element>(x, y, span.angles[j], span.angles[pairs + j]);
        put_line(span, to, at + j * step, y);
      }
    }
    for (std::int64_t j = pairs; j < shape.head_dim / 2; ++j) {
      ahead->fetch(1);
      copy_line(span, to, at + j * step);
    }
  }
}

// K of all heads, and after each of them what `values` does.
template <typename Element, typename Values>
void move_lines(const Job<Element>& job, const Values& values) {
  constexpr std::int64_t kBytes = sizeof(typename Element::Bits);
  const BlockShape& shape = job.shape;
  const ContentSide& side = shape.key.side;
  Spans found;
  std::size_t run = 0;
  std::int64_t token = 0;
  for (bool is_first = true; run < job.num_runs; is_first = false) {
    find_spans(job, &run, &token, &found);
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
      const std::int64_t at = (side.base + head * side.head_step) * kBytes;
      auto* const target = reinterpret_cast<std::byte*>(job.target(at / kBytes));
      if (shape.key.order == Order::kTokens) {
        key_rows<Element>(shape, found, at, target, job.ahead);
      } else if constexpr (kBytes == 2) {
        key_tiles<Element>(shape, found, at, target, job.ahead);
      }
      if (is_first) values(head);
    }
  }
}

}  // namespace
}  // namespace ATTNSTORE_PROCESSOR
}  // namespace attnstore
