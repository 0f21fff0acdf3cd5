// SPDX-License-Identifier: Apache-2.0
// Words apart: the highest byte of each, turned left by one bit, and the rest; and together again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnstore::codec {

/// The highest byte of the turned word at `at`. Words are little-endian, of 1, 2 or 4 bytes.
inline std::uint8_t top_of(const std::uint8_t* at, std::size_t word) {
  if (word == 1) return *at;
  return static_cast<std::uint8_t>(at[word - 1] << 1 | at[word - 2] >> 7);
}

/// Take words apart: `top` gets a byte of each, `low` the rest as lossless.h says.
void split(const std::uint8_t* raw, std::size_t num_words, std::size_t word, std::uint8_t* top,
           std::uint8_t* low);

/// Put words [first, first + count) of `num_words` together. `top` is that of the first of them,
/// `low` and `out` are those of all.
void merge(const std::uint8_t* top, const std::uint8_t* low, std::size_t first, std::size_t count,
           std::size_t num_words, std::size_t word, std::uint8_t* out);

}  // namespace attnstore::codec
