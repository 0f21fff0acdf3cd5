// SPDX-License-Identifier: Apache-2.0
// Fills one block of one layer with tokens of other positions: what one thread of PageRotator does
// at a time. It is compiled for several kinds of processors, and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rotate/rotation.h"

namespace attnstore {

// What lies side by side in memory, and so is done side by side. For kAny there is no fast way.
enum class Order : std::uint8_t {
  kAny,
  kTokens,  // tokens of one dim
  kDims,    // dims of one token
  kTiles,   // K: 16 tokens by 2 dims, V: 2 tokens by 16 dims; a tile is one line of 64 bytes
};

// Of an order other than kAny.
constexpr std::int64_t kBlockTokensMax = 1024;
constexpr std::int64_t kHeadDimMax = 1024;
constexpr std::int64_t kTileTokens = 16;  // of K

// Tokens that follow each other both in one page of a slot and in the block.
struct TokenRun {
  std::uint64_t page;  // where the page is in layer 0's part of the slots, in bytes
  std::int32_t source;
  std::int32_t target;
  std::int32_t count;
  const float* angles;  // num_pairs cosines, then as many sines; null: K is copied
};

// Where the elements of K or V are (page_content.h), worked out for each token and each dim: an
// element is at base + head * head_step + tokens[token] + dims[dim].
struct SideOffsets {
  ContentSide side;
  Order order;
  bool heads_are_whole;        // all of a head's elements lie in one run of the page
  const std::int64_t* tokens;  // [block_tokens]
  const std::int64_t* dims;    // [head_dim]
};

// What all blocks have in common. The arrays outlive it.
struct BlockShape {
  SideOffsets key;
  SideOffsets value;
  std::int64_t num_heads;
  std::int64_t head_dim;
  std::int64_t block_tokens;
  std::int64_t num_pairs;  // of dims that turn; the dims behind them are copied
  Pairing pairing;
  ElementType type;
  std::uint64_t run_bytes;  // page_map.h
  const std::uint64_t* run_offsets;
};

// Finds the fastest order that the rest of the shape allows, K's and V's.
void find_orders(BlockShape* shape);

// `runs` are of one block, in the order of their target tokens, and no token is twice in it.
// `slots` is where the layer's part of slot 0 is, `block` where the block is in its tensor. Other
// tokens of the block are left as they are. When it returns, other threads that synchronise with
// this one see the bytes.
using RotateBlock = void (*)(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                             const std::byte* slots, std::byte* block);

// Those that this processor can run, the fastest first.
std::vector<RotateBlock> rotate_blocks();

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ATTNSTORE_ROTATE_X86
void rotate_block_avx2(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                       const std::byte* slots, std::byte* block);
void rotate_block_bf16(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                       const std::byte* slots, std::byte* block);
void rotate_block_avx512(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                         const std::byte* slots, std::byte* block);
#endif

}  // namespace attnstore
