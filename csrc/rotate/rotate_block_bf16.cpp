// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "rotate/rotate_block.h"

#if defined(ATTNSTORE_ROTATE_X86)
// No header of the C++ library after this line (checksum_avx2.cpp says why).
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16,prefer-vector-width=512")
#define ATTNSTORE_AVX512
#define ATTNSTORE_AVX512_BF16
#define ATTNSTORE_PROCESSOR bf16_processor
#include "rotate/rotate_body.h"

namespace attnstore {

void rotate_block_bf16(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                       const std::byte* slots, std::byte* block) {
  bf16_processor::rotate_block(shape, runs, num_runs, slots, block);
}

}  // namespace attnstore
#endif
