// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "rotate/rotate_block.h"

#if defined(ATTNSTORE_ROTATE_X86)
// No header of the C++ library after this line (checksum_avx2.cpp says why).
#pragma GCC target("avx2,fma")
#define ATTNSTORE_AVX2
#define ATTNSTORE_PROCESSOR avx2_processor
#include "rotate/rotate_body.h"

namespace attnstore {

void rotate_block_avx2(const BlockShape& shape, const TokenRun* runs, std::size_t num_runs,
                       const std::byte* slots, std::byte* block) {
  avx2_processor::rotate_block(shape, runs, num_runs, slots, block);
}

}  // namespace attnstore
#endif
