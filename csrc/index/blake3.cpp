// SPDX-License-Identifier: Apache-2.0
#include "index/blake3.h"

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

Words8 compress(const Node& node, std::uint32_t more_flags = 0) {
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
    node.chained = compress(node);
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

}  // namespace

Digest blake3(const std::uint8_t* data, std::size_t size) {
  std::array<Words8, kDepthMax> open;  // whole subtrees, largest first
  std::size_t num_open = 0;
  std::uint64_t number = 0;
  for (; size > kChunkBytes; data += kChunkBytes, size -= kChunkBytes) {
    Words8 made = compress(chunk_node(data, kChunkBytes, number++));
    for (std::uint64_t whole = number; (whole & 1) == 0; whole >>= 1) {
      made = compress(parent_node(open[--num_open], made));
    }
    open[num_open++] = made;
  }
  Node root = chunk_node(data, size, number);
  while (num_open > 0) root = parent_node(open[--num_open], compress(root));
  const Words8 words = compress(root, kRoot);
  Digest digest;
  std::memcpy(digest.data(), words.data(), digest.size());
  return digest;
}

}  // namespace attnstore
