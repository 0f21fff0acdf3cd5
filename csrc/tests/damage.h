// SPDX-License-Identifier: Apache-2.0
// Damaged encodings, and what became of them. A decoder refuses some by itself. What it takes and
// decodes to other bytes the payload's checksum refuses, which is compared after it (io/codec.py);
// what decodes to the right bytes was not damaged where it matters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "tests/check.h"

using Bytes = std::vector<std::uint8_t>;

struct Outcomes {
  std::uint64_t by_decoder = 0, by_checksum = 0, right = 0;

  void count(bool is_taken, const Bytes& decoded, const Bytes& expected) {
    ++(!is_taken ? by_decoder : decoded == expected ? right : by_checksum);
  }
  void print(const char* codec) const {
    std::printf(
        "%s: %llu damaged inputs: %llu refused by the decoder, %llu by the payload's "
        "checksum, %llu decoded to the right bytes\n",
        codec, static_cast<unsigned long long>(by_decoder + by_checksum + right),
        static_cast<unsigned long long>(by_decoder), static_cast<unsigned long long>(by_checksum),
        static_cast<unsigned long long>(right));
  }
};

inline Bytes noise(std::size_t size, std::mt19937_64& random) {
  Bytes made(size);
  for (auto& byte : made) byte = static_cast<std::uint8_t>(random());
  return made;
}

/// Args: head: bytes in front that say how the rest is to be read: damaged more often.
inline void damage(Bytes& bytes, std::size_t head, std::mt19937_64& random) {
  switch (random() % 5) {
    case 0:  // a few bits
      for (std::uint64_t i = random() % 4 + 1; i > 0; --i) {
        bytes[random() % bytes.size()] ^= static_cast<std::uint8_t>(1U << random() % 8);
      }
      break;
    case 1:
      bytes[random() % std::min<std::size_t>(bytes.size(), head)] =
          static_cast<std::uint8_t>(random());
      break;
    case 2:
      bytes.resize(random() % bytes.size());
      break;
    case 3:
      bytes.resize(bytes.size() + random() % 40 + 1, static_cast<std::uint8_t>(random()));
      break;
    default: {  // a part from elsewhere
      const std::size_t size = random() % std::min<std::size_t>(bytes.size(), 64) + 1;
      std::memmove(bytes.data() + random() % (bytes.size() - size + 1),
                   bytes.data() + random() % (bytes.size() - size + 1), size);
    }
  }
  bytes.shrink_to_fit();  // so that the sanitizer sees what is read behind it
}

/// Whether all that differs is that the end is missing, or that there is more behind it.
inline bool is_cut(const Bytes& bytes, const Bytes& good) {
  const auto common = static_cast<std::ptrdiff_t>(std::min(bytes.size(), good.size()));
  return bytes.size() != good.size() &&
         std::equal(bytes.begin(), bytes.begin() + common, good.begin());
}
