// SPDX-License-Identifier: Apache-2.0
// The checksum for processors that have AVX2, which the package as a whole does not ask for.
#pragma once

#include <cstddef>

namespace attnstore {

struct CopiedPart {
  const unsigned char* data;
  std::size_t num_bytes;
};

}  // namespace attnstore

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ATTNSTORE_CHECKSUM_AVX2

namespace attnstore {

// `out` has room for 16 bytes.
void checksum_avx2(const void* data, std::size_t num_bytes, unsigned char* out);

// Copies `num_parts` parts to `to`, one behind the other. `out` gets the checksum of the copy.
void copy_checksum_avx2(unsigned char* to, const CopiedPart* parts, std::size_t num_parts,
                        unsigned char* out);

}  // namespace attnstore
#endif
