// SPDX-License-Identifier: Apache-2.0
// The lossless codec: numbers by their parts. Signs and mantissas are kept as they are;
// exponents are written by a Huffman code of their own in each block of 64 KiB. So K and V, layers
// and heads have codes of their own wherever a block holds one of them. The fast coding packs
// exponents of bfloat16 into 4 bits each: more bytes, which are decoded several times as fast.
//
// What is encoded begins with a byte, 1 for the fast coding and else 0. Then come its blocks, one
// after the other, each as (little-endian):
//
//   kind             1 byte: 0 stored, 1, 2, 4 coded as words of so many bytes, 3 packed, 8 filled
//   stored: the bytes. filled: the one byte that all are
//   coded:  first, last          1 byte each: the code has no bytes outside of them
//           lengths of codes     4 bits each, the lower half of a byte first
//           bytes of 4 streams   2 bytes each
//           4 streams            of N = bytes / word words the first, second, third ceil(N / 4),
//                                the rest: the highest byte of each word turned left by one bit
//           the rest of the words, turned so: of 2 bytes the lower one of each; of 4 the lower two
//                                of each, then the third of each; of 1 none
//   packed: first                1 byte: exponent e has the code e - first, if that is 0 to 15
//           number of escapes    2 bytes; these have none
//           codes                4 bits each of N words of 2 bytes: byte j has word j's in its
//                                lower half, word ceil(N / 2) + j's in the other; escapes any
//           the lower bytes of the words, turned so
//           escapes              the place of each word, 2 bytes; then the exponent of each, 1 byte
//
// A sign turned to the end leaves the exponent in the highest byte: all of it in bfloat16 and
// float32, with three bits of the mantissa in float16. A byte (float8) is not turned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnstore::codec {

constexpr std::size_t kBlockBytes = std::size_t{64} << 10;

/// The most bytes that encoding so many may take: one more a block, and one.
std::size_t lossless_bound(std::size_t raw_bytes);

/// Encode `raw`. Returns the bytes written, 0 if they are more than `capacity`.
/// Args: fast: by the fast coding, where that has room; else by the smaller one.
std::size_t lossless_encode(const std::uint8_t* raw, std::size_t raw_bytes, std::uint8_t* out,
                            std::size_t capacity, bool fast);

/// Decode exactly `raw_bytes`. False if `in` is not an encoding of so many bytes; `out` may have
/// been written to then. Whatever `in` has, nothing outside of both is touched.
bool lossless_decode(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                     std::size_t raw_bytes);

}  // namespace attnstore::codec
