// SPDX-License-Identifier: Apache-2.0
// XXH3-128, in the byte order of its canonical representation (big-endian).
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "io/checksum_avx2.h"

namespace attnstore {

constexpr std::size_t kChecksumBytes = 16;
using Checksum = std::array<std::byte, kChecksumBytes>;

[[nodiscard]] Checksum checksum(const std::byte* data, std::size_t num_bytes);

// The checksum of each of `num_pages` consecutive pages, with the kChecksumBytes at `zero_at` of
// each page taken as zero, into out[0 .. num_pages * kChecksumBytes).
void page_checksums(const std::byte* data, std::size_t num_pages, std::size_t page_bytes,
                    std::size_t zero_at, std::byte* out);

// Bytes that lie apart, and where they come to lie one behind the other.
struct Gathered {
  std::byte* to;
  std::size_t num_bytes;  // all of `of`
  std::vector<CopiedPart> of;
};

// Copy each, and put the checksum of the copy into out[kChecksumBytes * its number ..). What is
// copied may change meanwhile: the checksum is then of what has come.
void copy_checksums(const std::vector<Gathered>& copies, std::byte* out);

}  // namespace attnstore
