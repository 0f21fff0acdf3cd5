// SPDX-License-Identifier: Apache-2.0
#include "io/checksum_avx2.h"

#if defined(ATTNSTORE_CHECKSUM_AVX2)
#include <immintrin.h>

// No header of the C++ library after this line: what it inlines would be built for this processor
// and might be linked in for all.
#pragma GCC target("avx2")
#define XXH_VECTOR 2  // g++ does not define the macros by which it would be found
#define XXH_INLINE_ALL
#include <xxhash.h>
static_assert(XXH_VECTOR == XXH_AVX2);
#include "io/checksum_copy.h"

namespace attnstore {

void checksum_avx2(const void* data, std::size_t num_bytes, unsigned char* out) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, num_bytes));
  for (int i = 0; i < 16; ++i) out[i] = canonical.digest[i];
}

void copy_checksum_avx2(unsigned char* to, const CopiedPart* parts, std::size_t num_parts,
                        unsigned char* out) {
  copy_and_sum(to, parts, num_parts, out);
}

}  // namespace attnstore
#endif
