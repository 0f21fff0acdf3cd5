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

template <int kBits>
ATTNSTORE_SSE41 inline __m128i rotate_right(__m128i row) {
  return _mm_or_si128(_mm_srli_epi32(row, kBits), _mm_slli_epi32(row, 32 - kBits));
}

ATTNSTORE_SSE41 inline void mix(Rows& rows, __m128i x, __m128i y) {
  const __m128i by16 = _mm_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2);
  const __m128i by8 = _mm_set_epi8(12, 15, 14, 13, 8, 11, 10, 9, 4, 7, 6, 5, 0, 3, 2, 1);
  rows.a = _mm_add_epi32(_mm_add_epi32(rows.a, x), rows.b);
  rows.d = _mm_shuffle_epi8(_mm_xor_si128(rows.d, rows.a), by16);
  rows.c = _mm_add_epi32(rows.c, rows.d);
  rows.b = rotate_right<12>(_mm_xor_si128(rows.b, rows.c));
  rows.a = _mm_add_epi32(_mm_add_epi32(rows.a, y), rows.b);
  rows.d = _mm_shuffle_epi8(_mm_xor_si128(rows.d, rows.a), by8);
  rows.c = _mm_add_epi32(rows.c, rows.d);
  rows.b = rotate_right<7>(_mm_xor_si128(rows.b, rows.c));
}

// The words of a round that stand at these places of its order.
template <std::size_t kRound, std::size_t kA, std::size_t kB, std::size_t kC, std::size_t kD>
ATTNSTORE_SSE41 inline __m128i words_at(const Words16& words) {
  constexpr Order kOrder = order_of(kRound);
  return _mm_setr_epi32(static_cast<int>(words[kOrder[kA]]), static_cast<int>(words[kOrder[kB]]),
                        static_cast<int>(words[kOrder[kC]]), static_cast<int>(words[kOrder[kD]]));
}

template <std::size_t kRound>
ATTNSTORE_SSE41 inline void mix_all(Rows& rows, const Words16& words) {
  mix(rows, words_at<kRound, 0, 2, 4, 6>(words), words_at<kRound, 1, 3, 5, 7>(words));
  rows.a = _mm_shuffle_epi32(rows.a, _MM_SHUFFLE(2, 1, 0, 3));
  rows.c = _mm_shuffle_epi32(rows.c, _MM_SHUFFLE(0, 3, 2, 1));
  rows.d = _mm_shuffle_epi32(rows.d, _MM_SHUFFLE(1, 0, 3, 2));
  mix(rows, words_at<kRound, 14, 8, 10, 12>(words), words_at<kRound, 15, 9, 11, 13>(words));
  rows.a = _mm_shuffle_epi32(rows.a, _MM_SHUFFLE(0, 3, 2, 1));
  rows.c = _mm_shuffle_epi32(rows.c, _MM_SHUFFLE(2, 1, 0, 3));
  rows.d = _mm_shuffle_epi32(rows.d, _MM_SHUFFLE(1, 0, 3, 2));
}

ATTNSTORE_SSE41 Words8 compress_rows(const Node& node, std::uint32_t more_flags) {
  const auto* const h = reinterpret_cast<const __m128i*>(node.chained.data());
  Rows rows = {
      _mm_loadu_si128(h), _mm_loadu_si128(h + 1),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(kInitial.data())),
      _mm_setr_epi32(static_cast<int>(node.counter), static_cast<int>(node.counter >> 32),
                     static_cast<int>(node.num_bytes), static_cast<int>(node.flags | more_flags))};
  mix_all<0>(rows, node.words);
  mix_all<1>(rows, node.words);
  mix_all<2>(rows, node.words);
  mix_all<3>(rows, node.words);
  mix_all<4>(rows, node.words);
  mix_all<5>(rows, node.words);
  mix_all<6>(rows, node.words);
  Words8 out{};
  auto* const to = reinterpret_cast<__m128i*>(out.data());
  _mm_storeu_si128(to, _mm_xor_si128(rows.a, rows.c));
  _mm_storeu_si128(to + 1, _mm_xor_si128(rows.b, rows.d));
  return out;
}

const bool has_rows = __builtin_cpu_supports("sse4.1") != 0;
#endif

template <bool kPlain>
Words8 compress(const Node& node, std::uint32_t more_flags = 0) {
#if defined(__x86_64__)
  if (!kPlain && has_rows) return compress_rows(node, more_flags);
#endif
  return compress_plain(node, more_flags);
}

template <bool kPlain>
Node chunk_node(const std::uint8_t* data, std::size_t size, std::uint64_t number) {
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
    node.chained = compress<kPlain>(node);
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
Digest digest_of(const std::uint8_t* data, std::size_t size) {
  std::array<Words8, kDepthMax> open;  // whole subtrees, largest first
  std::size_t num_open = 0;
  std::uint64_t number = 0;
  for (; size > kChunkBytes; data += kChunkBytes, size -= kChunkBytes) {
    Words8 made = compress<kPlain>(chunk_node<kPlain>(data, kChunkBytes, number++));
    for (std::uint64_t whole = number; (whole & 1) == 0; whole >>= 1) {
      made = compress<kPlain>(parent_node(open[--num_open], made));
    }
    open[num_open++] = made;
  }
  Node root = chunk_node<kPlain>(data, size, number);
  while (num_open > 0) root = parent_node(open[--num_open], compress<kPlain>(root));
  const Words8 words = compress<kPlain>(root, kRoot);
  Digest digest;
  std::memcpy(digest.data(), words.data(), digest.size());
  return digest;
}

}  // namespace

Digest blake3(const std::uint8_t* data, std::size_t size) { return digest_of<false>(data, size); }

Digest blake3_plain(const std::uint8_t* data, std::size_t size) {
  return digest_of<true>(data, size);
}

}  // namespace attnstore
