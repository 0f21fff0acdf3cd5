// SPDX-License-Identifier: Apache-2.0
#include "checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <vector>

namespace attnstore {

Checksum checksum(const std::byte* data, std::size_t num_bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, num_bytes));
  Checksum result;
  static_assert(sizeof(canonical.digest) == kChecksumBytes);
  std::memcpy(result.data(), canonical.digest, kChecksumBytes);
  return result;
}

void page_checksums(const std::byte* data, std::size_t num_pages, std::size_t page_bytes,
                    std::size_t zero_at, std::byte* out) {
  // A copy in the cache and one pass over it cost less than three updates of a hash's state.
  std::vector<std::byte> copy(page_bytes);
  for (std::size_t page = 0; page < num_pages; ++page) {
    std::memcpy(copy.data(), data + page * page_bytes, page_bytes);
    std::memset(copy.data() + zero_at, 0, kChecksumBytes);
    const Checksum sum = checksum(copy.data(), page_bytes);
    std::memcpy(out + page * kChecksumBytes, sum.data(), kChecksumBytes);
  }
}

}  // namespace attnstore
