// SPDX-License-Identifier: Apache-2.0
// Copies and takes the checksum of the copy. Included behind <xxhash.h> by each variant's file,
// which has its own build of both: so what is here is static.
#pragma once

#include "io/checksum_avx2.h"

namespace attnstore {

// A block is still in the processor's nearest caches when its checksum is taken.
static constexpr std::size_t kBlockBytes = 128 * 1024;

// The checksum is of what is at `to`, which nobody else writes: the parts may change meanwhile.
static void copy_and_sum(unsigned char* to, const CopiedPart* parts, std::size_t num_parts,
                         unsigned char* out) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (std::size_t part = 0; part < num_parts; ++part) {
    const unsigned char* from = parts[part].data;
    std::size_t left = parts[part].num_bytes;
    while (left > 0) {
      const std::size_t size = left < kBlockBytes ? left : kBlockBytes;
      __builtin_memcpy(to, from, size);
      XXH3_128bits_update(&state, to, size);
      to += size;
      from += size;
      left -= size;
    }
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
  __builtin_memcpy(out, canonical.digest, sizeof(canonical.digest));
}

}  // namespace attnstore
