// SPDX-License-Identifier: Apache-2.0
// The body of rotate_block.h, for the processor that the file that includes it is compiled for:
// ATTNSTORE_PROCESSOR names a namespace of its own. What it needs of the C++ library is included
// before. Loops are plain, for the compiler to make vectors of; only whole lines that are stored,
// and tiles that are put together, are done by hand where that is faster.
//
// What is stored goes past the caches where it is whole lines (stream_copy.h says why).

#include "rotate/rotate_block.h"

namespace attnstore {
namespace ATTNSTORE_PROCESSOR {
namespace {

constexpr std::uintptr_t kLine = 64;

// A page of a slot, in the order in which it stands. Tokens of a block are read in another one, in
// short pieces of two pages, which the processor does not foresee. So whoever writes a line of the
// block has a line of the page brought into the second cache, a while before it is read.
class Ahead {
 public:
  Ahead(const std::byte* page, std::int64_t num_bytes)
      : next_(page + (num_bytes < kBytes ? num_bytes : kBytes)), stop_(page + num_bytes) {}

  void fetch(std::int64_t num_lines) {
    const std::byte* stop = next_ + num_lines * static_cast<std::int64_t>(kLine);
    if (stop > stop_) stop = stop_;
    for (; next_ < stop; next_ += kLine) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr std::int64_t kBytes = 4096;
  const std::byte* next_;
  const std::byte* stop_;
};

// Two elements of 16 bits, wherever they are.
using Word = std::uint32_t __attribute__((may_alias, aligned(2)));

constexpr std::int64_t kWords = 16;  // of a line

// A line each of the first and of the second dims. Each word has two elements of the same pair or
// of two, which have an angle each: NeoX, and tokens side by side.
template <typename Element>
void rotate_words(const Word* __restrict x1, const Word* __restrict x2, Word* __restrict y1,
                  Word* __restrict y2, const float* cosines, const float* sines) {
  using Two = Halves<Element>;
  const float low_cosine = cosines[0];
  const float high_cosine = cosines[1];
  const float low_sine = sines[0];
  const float high_sine = sines[1];
  for (std::int64_t i = 0; i < kWords; ++i) {
    const float low1 = Two::low(x1[i]);
    const float low2 = Two::low(x2[i]);
    const float high1 = Two::high(x1[i]);
    const float high2 = Two::high(x2[i]);
    y1[i] = Two::join(low1 * low_cosine - low2 * low_sine, high1 * high_cosine - high2 * high_sine);
    y2[i] = Two::join(low2 * low_cosine + low1 * low_sine, high2 * high_cosine + high1 * high_sine);
  }
}

// A line of words of which each is a pair.
template <typename Element>
void rotate_pairs(const Word* __restrict x, Word* __restrict y, float cosine, float sine) {
  using Two = Halves<Element>;
  for (std::int64_t i = 0; i < kWords; ++i) {
    const float low = Two::low(x[i]);
    const float high = Two::high(x[i]);
    y[i] = Two::join(low * cosine - high * sine, high * cosine + low * sine);
  }
}

inline void stream_lines(std::byte* target, const std::byte* source, std::size_t num_bytes) {
#if defined(ATTNSTORE_AVX512)
  for (std::size_t i = 0; i < num_bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
  }
#elif defined(ATTNSTORE_AVX2)
  for (std::size_t i = 0; i < num_bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
  }
#elif defined(__SSE2__)
  for (std::size_t i = 0; i < num_bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
#else
  __builtin_memcpy(target, source, num_bytes);
#endif
}

// Streaming stores are weakly ordered: they are complete before anyone is told.
inline void finish_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

inline void put(void* to, const void* from, std::size_t num_bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kLine;
  if (num_bytes < head + kLine) {
    __builtin_memcpy(target, source, num_bytes);
    return;
  }
  if (head != 0) __builtin_memcpy(target, source, head);
  const std::size_t lines = (num_bytes - head) / kLine * kLine;
  stream_lines(target + head, source + head, lines);
  const std::size_t done = head + lines;
  if (done != num_bytes) __builtin_memcpy(target + done, source + done, num_bytes - done);
}

// A long piece of a page.
inline void put_long(void* to, const void* from, std::int64_t num_bytes, Ahead* ahead) {
  constexpr std::uintptr_t kPiece = 1024;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  while (num_bytes > 0) {
    auto size =
        static_cast<std::int64_t>(kPiece - reinterpret_cast<std::uintptr_t>(target) % kPiece);
    if (size > num_bytes) size = num_bytes;
    put(target, source, static_cast<std::size_t>(size));
    ahead->fetch(size / static_cast<std::int64_t>(kLine));
    target += size;
    source += size;
    num_bytes -= size;
  }
}

#if defined(ATTNSTORE_AVX512_BF16)
// What the loops above do, where the processor rounds. It makes zeros of numbers below 2^-126.

inline __m512 low_of(__m512i words) {
  // With the mask, since g++ warns of the intrinsic without one.
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xFFFF, words, 16));
}
inline __m512 high_of(__m512i words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
}
inline __m512i join(__m512 low, __m512 high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

// The angles of the low and of the high halves of words.
struct WordAngles {
  WordAngles(const float* cosines, const float* sines)
      : low_cosine(_mm512_set1_ps(cosines[0])),
        high_cosine(_mm512_set1_ps(cosines[1])),
        low_sine(_mm512_set1_ps(sines[0])),
        high_sine(_mm512_set1_ps(sines[1])) {}
  __m512 low_cosine;
  __m512 high_cosine;
  __m512 low_sine;
  __m512 high_sine;
};

ATTNSTORE_ALWAYS_INLINE void turn_words(__m512i* one, __m512i* two, const WordAngles& angles) {
  const __m512 low1 = low_of(*one);
  const __m512 low2 = low_of(*two);
  const __m512 high1 = high_of(*one);
  const __m512 high2 = high_of(*two);
  *one = join(_mm512_fmsub_ps(low1, angles.low_cosine, _mm512_mul_ps(low2, angles.low_sine)),
              _mm512_fmsub_ps(high1, angles.high_cosine, _mm512_mul_ps(high2, angles.high_sine)));
  *two = join(_mm512_fmadd_ps(low2, angles.low_cosine, _mm512_mul_ps(low1, angles.low_sine)),
              _mm512_fmadd_ps(high2, angles.high_cosine, _mm512_mul_ps(high1, angles.high_sine)));
}

template <>
inline void rotate_words<Bfloat16>(const Word* __restrict x1, const Word* __restrict x2,
                                   Word* __restrict y1, Word* __restrict y2, const float* cosines,
                                   const float* sines) {
  __m512i one = _mm512_loadu_si512(x1);
  __m512i two = _mm512_loadu_si512(x2);
  turn_words(&one, &two, WordAngles(cosines, sines));
  _mm512_storeu_si512(y1, one);
  _mm512_storeu_si512(y2, two);
}

template <>
inline void rotate_pairs<Bfloat16>(const Word* __restrict x, Word* __restrict y, float cosine,
                                   float sine) {
  const __m512 cosines = _mm512_set1_ps(cosine);
  const __m512 sines = _mm512_set1_ps(sine);
  const __m512i words = _mm512_loadu_si512(x);
  const __m512 low = low_of(words);
  const __m512 high = high_of(words);
  _mm512_storeu_si512(y, join(_mm512_fmsub_ps(low, cosines, _mm512_mul_ps(high, sines)),
                              _mm512_fmadd_ps(high, cosines, _mm512_mul_ps(low, sines))));
}
#endif

template <typename Element>
struct Job {
  using Bits = typename Element::Bits;

  const BlockShape& shape;
  const TokenRun* runs;
  std::size_t num_runs;
  const std::byte* slots;
  std::byte* block;
  Ahead* ahead;  // the page that the block before did not get tokens from

  [[nodiscard]] const Bits* source(const TokenRun& run) const {
    return reinterpret_cast<const Bits*>(slots + run.page);
  }
  [[nodiscard]] Bits* target(std::int64_t offset) const {
    const std::uint64_t at = static_cast<std::uint64_t>(offset) * sizeof(Bits);
    return reinterpret_cast<Bits*>(block + shape.run_offsets[at / shape.run_bytes] +
                                   at % shape.run_bytes);
  }
};

// K and V of one head, element by element.

template <typename Element>
void key_by_element(const Job<Element>& job, std::int64_t at) {
  const BlockShape& shape = job.shape;
  const SideOffsets& side = shape.key;
  for (std::size_t k = 0; k < job.num_runs; ++k) {
    const TokenRun& run = job.runs[k];
    const std::int64_t num_turning = run.angles == nullptr ? 0 : shape.num_pairs;
    for (std::int64_t i = 0; i < run.count; ++i) {
      const auto* const source = job.source(run) + at + side.tokens[run.source + i];
      const std::int64_t to = at + side.tokens[run.target + i];
      for (std::int64_t pair = 0; pair < num_turning; ++pair) {
        const DimPair dims = pair_dims(shape.pairing, shape.num_pairs, pair);
        const std::int64_t one = side.dims[dims.first];
        const std::int64_t two = side.dims[dims.second];
        rotate_pair<Element>(source[one], source[two], run.angles[pair],
                             run.angles[shape.num_pairs + pair], job.target(to + one),
                             job.target(to + two));
      }
      for (std::int64_t dim = 2 * num_turning; dim < shape.head_dim; ++dim) {
        *job.target(to + side.dims[dim]) = source[side.dims[dim]];
      }
    }
  }
}

template <typename Element>
void value_by_element(const Job<Element>& job, std::int64_t at) {
  const SideOffsets& side = job.shape.value;
  for (std::size_t k = 0; k < job.num_runs; ++k) {
    const TokenRun& run = job.runs[k];
    for (std::int64_t i = 0; i < run.count; ++i) {
      const auto* const source = job.source(run) + at + side.tokens[run.source + i];
      const std::int64_t to = at + side.tokens[run.target + i];
      for (std::int64_t dim = 0; dim < job.shape.head_dim; ++dim) {
        *job.target(to + side.dims[dim]) = source[side.dims[dim]];
      }
    }
  }
}

}  // namespace
}  // namespace ATTNSTORE_PROCESSOR
}  // namespace attnstore

#include "rotate/rotate_lines.h"
#include "rotate/rotate_rows.h"
#include "rotate/rotate_tiles.h"

namespace attnstore {
namespace ATTNSTORE_PROCESSOR {
namespace {

// `at` is where the head's part begins.

template <typename Element>
void move_values(const Job<Element>& job, std::int64_t at) {
  switch (job.shape.value.order) {
    case Order::kDims:
      value_dims(job, at);
      return;
    case Order::kTiles:
      if constexpr (sizeof(typename Element::Bits) == 2) value_tiles(job, at);
      return;
    case Order::kTokens:
    case Order::kAny:
      value_by_element(job, at);
  }
}

template <typename Element>
void rotate_elements(const Job<Element>& job) {
  const BlockShape& shape = job.shape;
  const ContentSide& keys = shape.key.side;
  const auto values = [&job](std::int64_t head) {
    const ContentSide& side = job.shape.value.side;
    move_values(job, side.base + head * side.head_step);
  };
  switch (shape.key.order) {
    case Order::kTokens:
    case Order::kTiles:
      move_lines(job, values);
      return;
    case Order::kDims:
      if (shape.value.order == Order::kDims) {
        token_rows(job);
        return;
      }
      break;
    case Order::kAny:
      break;
  }
  for (std::int64_t head = 0; head < shape.num_heads; ++head) {
    const std::int64_t at = keys.base + head * keys.head_step;
    if (shape.key.order == Order::kDims) {
      key_dims(job, at);
    } else {
      key_by_element(job, at);
    }
    values(head);
  }
}

template <typename Element>
void rotate_block_of(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                     const std::byte* slots, std::byte* block) {
  const std::int64_t elements = 2 * shape.num_heads * shape.block_tokens * shape.head_dim;
  Ahead ahead(slots + runs[num_runs - 1].page,
              elements * static_cast<std::int64_t>(sizeof(typename Element::Bits)));
  rotate_elements(Job<Element>{shape, runs, num_runs, slots, block, &ahead});
}

void rotate_block(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                  const std::byte* slots, std::byte* block) {
  switch (shape.type) {
    case ElementType::kBfloat16:
      rotate_block_of<Bfloat16>(shape, runs, num_runs, slots, block);
      break;
    case ElementType::kFloat16:
      rotate_block_of<Float16>(shape, runs, num_runs, slots, block);
      break;
    case ElementType::kFloat32:
      rotate_block_of<Float32>(shape, runs, num_runs, slots, block);
  }
  finish_stream();
}

}  // namespace
}  // namespace ATTNSTORE_PROCESSOR
}  // namespace attnstore
