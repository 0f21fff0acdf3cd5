// SPDX-License-Identifier: Apache-2.0
// The checksum for processors that have AVX2, which the package as a whole does not ask for.
#pragma once

#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ATTNSTORE_CHECKSUM_AVX2

namespace attnstore {

// `out` has room for 16 bytes.
void checksum_avx2(const void* data, std::size_t num_bytes, unsigned char* out);

}  // namespace attnstore
#endif
