// SPDX-License-Identifier: Apache-2.0
// Packed blocks of 2-byte words: 4 bits for the highest byte of a turned word, so that decoding is
// plain arithmetic, which compilers make vector code of. For bfloat16: its exponents are few.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnstore::codec {

/// Encode so many words of a block. Returns the end, or null where that takes more than `most`
/// bytes.
std::uint8_t* pack(const std::uint8_t* raw, std::size_t num_words, std::uint8_t* out,
                   std::size_t most);

/// Decode what pack() has written. Returns the bytes read, 0 if `in` is not of so many words.
std::size_t unpack(const std::uint8_t* in, std::size_t in_size, std::uint8_t* out,
                   std::size_t num_words);

}  // namespace attnstore::codec
