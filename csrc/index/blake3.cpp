// SPDX-License-Identifier: Apache-2.0
#include "index/blake3.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <utility>

namespace attnstore {
namespace {

using Words8 = std::array<std::uint32_t, 8>;
using Words16 = std::array<std::uint32_t, 16>;

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kChunkBytes = 1024;
constexpr std::size_t kDepthMax = 54;  // of the tree over 2^64 bytes

enum Flag : std::uint32_t { kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8 };

constexpr Words8 kInitial = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

using Order = std::array<std::size_t, 16>;
constexpr Order kPermutation = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

constexpr Order order_of(std::size_t round) {
  Order order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (std::size_t i = 0; i < round; ++i) {
    Order next = order;
    for (std::size_t at = 0; at < order.size(); ++at) next[at] = order[kPermutation[at]];
    order = next;
  }
  return order;
}

inline std::uint32_t rotate_right(std::uint32_t value, int bits) {
  return value >> bits | value << (32 - bits);
}

inline void mix(Words16& state, std::size_t a, std::size_t b, std::size_t c, std::size_t d,
                std::uint32_t x, std::uint32_t y) {
  state[a] = state[a] + state[b] + x;
  state[d] = rotate_right(state[d] ^ state[a], 16);
  state[c] = state[c] + state[d];
  state[b] = rotate_right(state[b] ^ state[c], 12);
  state[a] = state[a] + state[b] + y;
  state[d] = rotate_right(state[d] ^ state[a], 8);
  state[c] = state[c] + state[d];
  state[b] = rotate_right(state[b] ^ state[c], 7);
}

// The order of the words is known when this is compiled: no look-up is left of it.
template <std::size_t kRound>
inline void mix_all(Words16& state, const Words16& words) {
  constexpr Order kOrder = order_of(kRound);
  mix(state, 0, 4, 8, 12, words[kOrder[0]], words[kOrder[1]]);
  mix(state, 1, 5, 9, 13, words[kOrder[2]], words[kOrder[3]]);
  mix(state, 2, 6, 10, 14, words[kOrder[4]], words[kOrder[5]]);
  mix(state, 3, 7, 11, 15, words[kOrder[6]], words[kOrder[7]]);
  mix(state, 0, 5, 10, 15, words[kOrder[8]], words[kOrder[9]]);
  mix(state, 1, 6, 11, 12, words[kOrder[10]], words[kOrder[11]]);
  mix(state, 2, 7, 8, 13, words[kOrder[12]], words[kOrder[13]]);
  mix(state, 3, 4, 9, 14, words[kOrder[14]], words[kOrder[15]]);
}

// The last block of a node of the tree, before it is known whether the node is the root.
struct Node {
  Words8 chained = kInitial;
  Words16 words{};
  std::uint64_t counter = 0;
  std::uint32_t num_bytes = 0;
  std::uint32_t flags = 0;
};

Words8 compress_plain(const Node& node, std::uint32_t more_flags) {
  const Words8& h = node.chained;
  Words16 state = {h[0],
                   h[1],
                   h[2],
                   h[3],
                   h[4],
                   h[5],
                   h[6],
                   h[7],
                   kInitial[0],
                   kInitial[1],
                   kInitial[2],
                   kInitial[3],
                   static_cast<std::uint32_t>(node.counter),
                   static_cast<std::uint32_t>(node.counter >> 32),
                   node.num_bytes,
                   node.flags | more_flags};
  mix_all<0>(state, node.words);
  mix_all<1>(state, node.words);
  mix_all<2>(state, node.words);
  mix_all<3>(state, node.words);
  mix_all<4>(state, node.words);
  mix_all<5>(state, node.words);
  mix_all<6>(state, node.words);
  Words8 out{};
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = state[i] ^ state[i + 8];
  return out;
}

#if defined(__x86_64__)
// The same with a row of the state in a register. Blocks follow each other, so what counts is how
// long one takes: the row that is ready last, b, is the one that stays where it is between columns
// and diagonals.
#define ATTNSTORE_SSE41 __attribute__((target("sse4.1")))

struct Rows {
  __m128i a, b, c, d;
};

// The words of a round in the order in which it takes them: of its columns, then of its diagonals.
struct RoundWords {
  __m128i x, y, diagonal_x, diagonal_y;
};

template <int kBits>
ATTNSTORE_SSE41 inline __m128i rotate_right(__m128i row) {
  return _mm_or_si128(_mm_srli_epi32(row, kBits), _mm_slli_epi32(row, 32 - kBits));
}

// a + word + b, where b is ready last: a compiler may add it first unless it cannot see the sum.
ATTNSTORE_SSE41 inline __m128i sum_of(__m128i a, __m128i word, __m128i b) {
  __m128i sum = _mm_add_epi32(a, word);
  asm("" : "+x"(sum));
  return _mm_add_epi32(sum, b);
}

ATTNSTORE_SSE41 inline void mix(Rows& rows, __m128i x, __m128i y) {
  const __m128i by16 = _mm_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2);
  const __m128i by8 = _mm_set_epi8(12, 15, 14, 13, 8, 11, 10, 9, 4, 7, 6, 5, 0, 3, 2, 1);
  rows.a = sum_of(rows.a, x, rows.b);
  rows.d = _mm_shuffle_epi8(_mm_xor_si128(rows.d, rows.a), by16);
  rows.c = _mm_add_epi32(rows.c, rows.d);
  rows.b = rotate_right<12>(_mm_xor_si128(rows.b, rows.c));
  rows.a = sum_of(rows.a, y, rows.b);
  rows.d = _mm_shuffle_epi8(_mm_xor_si128(rows.d, rows.a), by8);
  rows.c = _mm_add_epi32(rows.c, rows.d);
  rows.b = rotate_right<7>(_mm_xor_si128(rows.b, rows.c));
}

template <int kLanes>
ATTNSTORE_SSE41 inline __m128i lanes_of(__m128i first, __m128i second) {
  return _mm_castps_si128(
      _mm_shuffle_ps(_mm_castsi128_ps(first), _mm_castsi128_ps(second), kLanes));
}

ATTNSTORE_SSE41 inline RoundWords first_words(const Words16& words) {
  const auto* const from = reinterpret_cast<const __m128i*>(words.data());
  const __m128i w0 = _mm_loadu_si128(from), w4 = _mm_loadu_si128(from + 1);
  const __m128i w8 = _mm_loadu_si128(from + 2), w12 = _mm_loadu_si128(from + 3);
  const __m128i even = lanes_of<_MM_SHUFFLE(2, 0, 2, 0)>(w8, w12);
  const __m128i odd = lanes_of<_MM_SHUFFLE(3, 1, 3, 1)>(w8, w12);
  return {lanes_of<_MM_SHUFFLE(2, 0, 2, 0)>(w0, w4), lanes_of<_MM_SHUFFLE(3, 1, 3, 1)>(w0, w4),
          _mm_shuffle_epi32(even, _MM_SHUFFLE(2, 1, 0, 3)),
          _mm_shuffle_epi32(odd, _MM_SHUFFLE(2, 1, 0, 3))};
}

// Those of the round after it: kPermutation. Numbers are those of the words in the round before,
// whose rows are 0 2 4 6, 1 3 5 7, 14 8 10 12 and 15 9 11 13.
ATTNSTORE_SSE41 inline RoundWords next_words(const RoundWords& was) {
  const __m128i w4_2_3_7 = lanes_of<_MM_SHUFFLE(3, 1, 1, 2)>(was.x, was.y);
  const __m128i w6_6_0_0 = _mm_shuffle_epi32(was.x, _MM_SHUFFLE(0, 0, 3, 3));
  const __m128i w10_10_13_13 = lanes_of<_MM_SHUFFLE(3, 3, 2, 2)>(was.diagonal_x, was.diagonal_y);
  const __m128i w15_9_1_3 = _mm_unpacklo_epi64(was.diagonal_y, was.y);
  const __m128i w15_9_1_12 = _mm_blend_epi16(w15_9_1_3, was.diagonal_x, 0xC0);
  const __m128i w5_11_7_13 = _mm_unpackhi_epi32(was.y, was.diagonal_y);
  const __m128i w14_5_8_11 = _mm_unpacklo_epi32(was.diagonal_x, w5_11_7_13);
  return {_mm_shuffle_epi32(w4_2_3_7, _MM_SHUFFLE(0, 3, 2, 1)),
          _mm_blend_epi16(w6_6_0_0, w10_10_13_13, 0xCC),
          _mm_shuffle_epi32(w15_9_1_12, _MM_SHUFFLE(1, 3, 2, 0)),
          _mm_shuffle_epi32(w14_5_8_11, _MM_SHUFFLE(0, 1, 3, 2))};
}

ATTNSTORE_SSE41 inline void mix_all(Rows& rows, const RoundWords& words) {
  mix(rows, words.x, words.y);
  rows.a = _mm_shuffle_epi32(rows.a, _MM_SHUFFLE(2, 1, 0, 3));
  rows.c = _mm_shuffle_epi32(rows.c, _MM_SHUFFLE(0, 3, 2, 1));
  rows.d = _mm_shuffle_epi32(rows.d, _MM_SHUFFLE(1, 0, 3, 2));
  mix(rows, words.diagonal_x, words.diagonal_y);
  rows.a = _mm_shuffle_epi32(rows.a, _MM_SHUFFLE(0, 3, 2, 1));
  rows.c = _mm_shuffle_epi32(rows.c, _MM_SHUFFLE(2, 1, 0, 3));
  rows.d = _mm_shuffle_epi32(rows.d, _MM_SHUFFLE(1, 0, 3, 2));
}

ATTNSTORE_SSE41 void compress_rows(const Node& node, std::uint32_t more_flags, Words8& out) {
  const auto* const h = reinterpret_cast<const __m128i*>(node.chained.data());
  Rows rows = {
      _mm_loadu_si128(h), _mm_loadu_si128(h + 1),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(kInitial.data())),
      _mm_setr_epi32(static_cast<int>(node.counter), static_cast<int>(node.counter >> 32),
                     static_cast<int>(node.num_bytes), static_cast<int>(node.flags | more_flags))};
  RoundWords words = first_words(node.words);
  mix_all(rows, words);
  for (int round = 1; round < 7; ++round) {
    words = next_words(words);
    mix_all(rows, words);
  }
  auto* const to = reinterpret_cast<__m128i*>(out.data());
  _mm_storeu_si128(to, _mm_xor_si128(rows.a, rows.c));
  _mm_storeu_si128(to + 1, _mm_xor_si128(rows.b, rows.d));
}

const bool has_rows = __builtin_cpu_supports("sse4.1") != 0;
#endif

// `out` may be what the node is chained to.
template <bool kPlain>
void compress(const Node& node, std::uint32_t more_flags, Words8& out) {
#if defined(__x86_64__)
  if (!kPlain && has_rows) return compress_rows(node, more_flags, out);
#endif
  out = compress_plain(node, more_flags);
}

template <bool kPlain>
Words8 compress(const Node& node, std::uint32_t more_flags = 0) {
  Words8 out{};
  compress<kPlain>(node, more_flags, out);
  return out;
}

template <bool kPlain>
Node chunk_node(const std::uint8_t* data, std::size_t size, std::uint64_t number,
                const Beside& beside) {
  Node node;
  node.counter = number;
  node.flags = kChunkStart;
  while (true) {
    const std::size_t num_bytes = std::min(size, kBlockBytes);
    if (num_bytes < kBlockBytes) node.words = {};
    if (num_bytes > 0) std::memcpy(node.words.data(), data, num_bytes);  // x86-64: little-endian
    node.num_bytes = static_cast<std::uint32_t>(num_bytes);
    data += num_bytes;
    size -= num_bytes;
    if (size == 0) break;
    compress<kPlain>(node, 0, node.chained);
    if (beside) beside();
    node.flags = 0;
  }
  node.flags |= kChunkEnd;
  return node;
}

Node parent_node(const Words8& left, const Words8& right) {
  Node node;
  std::copy(left.begin(), left.end(), node.words.begin());
  std::copy(right.begin(), right.end(), node.words.begin() + left.size());
  node.num_bytes = kBlockBytes;
  node.flags = kParent;
  return node;
}

template <bool kPlain>
Digest digest_of(const std::uint8_t* data, std::size_t size, const Beside& beside = {}) {
  std::array<Words8, kDepthMax> open;  // whole subtrees, largest first
  std::size_t num_open = 0;
  std::uint64_t number = 0;
  for (; size > kChunkBytes; data += kChunkBytes, size -= kChunkBytes) {
    Words8 made = compress<kPlain>(chunk_node<kPlain>(data, kChunkBytes, number++, beside));
    for (std::uint64_t whole = number; (whole & 1) == 0; whole >>= 1) {
      made = compress<kPlain>(parent_node(open[--num_open], made));
    }
    open[num_open++] = made;
  }
  Node root = chunk_node<kPlain>(data, size, number, beside);
  while (num_open > 0) root = parent_node(open[--num_open], compress<kPlain>(root));
  const Words8 words = compress<kPlain>(root, kRoot);
  Digest digest;
  std::memcpy(digest.data(), words.data(), digest.size());
  return digest;
}

}  // namespace

Digest blake3(const std::uint8_t* data, std::size_t size, const Beside& beside) {
  return digest_of<false>(data, size, beside);
}

Digest blake3_plain(const std::uint8_t* data, std::size_t size) {
  return digest_of<true>(data, size);
}

}  // namespace attnstore
