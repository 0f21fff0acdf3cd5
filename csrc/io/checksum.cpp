// SPDX-License-Identifier: Apache-2.0
#include "io/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <vector>

#include "io/checksum_avx2.h"
#include "io/checksum_copy.h"

namespace attnstore {

namespace {

using Variant = void (*)(const void*, std::size_t, unsigned char*);
using CopyVariant = void (*)(unsigned char*, const CopiedPart*, std::size_t, unsigned char*);

void checksum_plain(const void* data, std::size_t num_bytes, unsigned char* out) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, num_bytes));
  static_assert(sizeof(canonical.digest) == kChecksumBytes);
  std::memcpy(out, canonical.digest, kChecksumBytes);
}

Variant choose() {
#if defined(ATTNSTORE_CHECKSUM_AVX2)
  if (__builtin_cpu_supports("avx2")) return checksum_avx2;
#endif
  return checksum_plain;
}

CopyVariant choose_copy() {
#if defined(ATTNSTORE_CHECKSUM_AVX2)
  if (__builtin_cpu_supports("avx2")) return copy_checksum_avx2;
#endif
  return copy_and_sum;
}

}  // namespace

Checksum checksum(const std::byte* data, std::size_t num_bytes) {
  static const Variant variant = choose();
  Checksum result;
  variant(data, num_bytes, reinterpret_cast<unsigned char*>(result.data()));
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

void copy_checksums(const std::vector<Gathered>& copies, std::byte* out) {
  static const CopyVariant variant = choose_copy();
  auto* sums = reinterpret_cast<unsigned char*>(out);
  for (const Gathered& copy : copies) {
    variant(reinterpret_cast<unsigned char*>(copy.to), copy.of.data(), copy.of.size(), sums);
    sums += kChecksumBytes;
  }
}

}  // namespace attnstore
