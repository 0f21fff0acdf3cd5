// SPDX-License-Identifier: Apache-2.0
#include "rotate/rotate_block.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ATTNSTORE_PROCESSOR any_processor
#include "rotate/rotate_body.h"

namespace attnstore {

namespace {

bool heads_are_whole(const BlockShape& shape, const SideOffsets& side) {
  const std::int64_t in_run =
      static_cast<std::int64_t>(shape.run_bytes) / element_bytes(shape.type);
  const auto tokens = std::minmax_element(side.tokens, side.tokens + shape.block_tokens);
  const auto dims = std::minmax_element(side.dims, side.dims + shape.head_dim);
  for (std::int64_t head = 0; head < shape.num_heads; ++head) {
    const std::int64_t at = side.side.base + head * side.side.head_step;
    const std::int64_t first = at + *tokens.first + *dims.first;
    const std::int64_t last = at + *tokens.second + *dims.second;
    if (first / in_run != last / in_run) return false;
  }
  return true;
}

bool is_fast(const BlockShape& shape, const SideOffsets& side) {
  return side.heads_are_whole && shape.block_tokens <= kBlockTokensMax &&
         shape.head_dim <= kHeadDimMax;
}

bool has_tiles(const BlockShape& shape) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return shape.type != ElementType::kFloat32;
#else
  return false;  // two elements are read as one number
#endif
}

Order key_order(const BlockShape& shape) {
  const ContentSide& side = shape.key.side;
  if (!is_fast(shape, shape.key)) return Order::kAny;
  const bool dims_are_even = side.dim_group >= shape.head_dim;
  if (dims_are_even && side.dim_inner == 1) return Order::kDims;
  const bool tokens_are_even = side.token_group >= shape.block_tokens;
  if (dims_are_even && tokens_are_even && side.token_inner == 1) return Order::kTokens;
  const bool is_tile = side.dim_group == 2 && side.dim_inner == 1 &&
                       side.token_group == kTileTokens && side.token_inner == 2 &&
                       side.dim_outer % 2 == 0 && shape.head_dim % 2 == 0;
  const bool turns_alike = shape.pairing == Pairing::kGptj || shape.num_pairs % 2 == 0;
  return has_tiles(shape) && is_tile && turns_alike ? Order::kTiles : Order::kAny;
}

Order value_order(const BlockShape& shape) {
  const ContentSide& side = shape.value.side;
  if (!is_fast(shape, shape.value)) return Order::kAny;
  if (side.dim_group >= shape.head_dim && side.dim_inner == 1) return Order::kDims;
  const bool is_tile = side.token_group == 2 && side.token_inner == 1 && side.token_outer == 32 &&
                       side.dim_group == 16 && side.dim_inner == 2 && shape.head_dim % 16 == 0;
  return has_tiles(shape) && is_tile ? Order::kTiles : Order::kAny;
}

}  // namespace

void find_orders(BlockShape* shape) {
  shape->key.heads_are_whole = heads_are_whole(*shape, shape->key);
  shape->value.heads_are_whole = heads_are_whole(*shape, shape->value);
  shape->key.order = key_order(*shape);
  shape->value.order = value_order(*shape);
}

std::vector<RotateBlock> rotate_blocks() {
  std::vector<RotateBlock> found;
#if defined(ATTNSTORE_ROTATE_X86)
  const bool has_fma = __builtin_cpu_supports("fma");
  const bool has_avx512 = has_fma && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(rotate_block_bf16);
  if (has_avx512) found.push_back(rotate_block_avx512);
  if (has_fma && __builtin_cpu_supports("avx2")) found.push_back(rotate_block_avx2);
#endif
  found.push_back(any_processor::rotate_block);
  return found;
}

}  // namespace attnstore
