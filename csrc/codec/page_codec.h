// SPDX-License-Identifier: Apache-2.0
// Pages of bfloat16 in fewer bytes, so that each has a place of its own and is decoded alone: every
// bit comes back. Numbers of KV have few exponents, and those take 3 bits instead of 8.
//
// Of a page of n numbers, in groups of 256, the last of which may have fewer:
//
//   n                 a byte a number: its sign, then its mantissa
//   3 * ceil(n / 8)   codes, 3 bits each, 8 in a little-endian word of 24 bits; 0 behind the last
//   groups            bases: code c < 7 is the exponent base + c
//   groups            how many numbers of the group have code 7: escapes
//   escapes           their exponents, in the order of the numbers
//
// A group's base is the lowest of those by which most of its numbers have a code. So the bytes are
// the same, whichever processor encodes. Numbers around zero take 0.71 of their bytes.
//
// What is read is trusted in nothing: a decoder reads and writes within its buffers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnstore::codec {

constexpr std::size_t kGroupNumbers = 256;

/// Encode a page of 2 * n bytes. Returns the bytes written; 0: they are more than `room`, or a
/// page has an odd number of bytes or none.
std::size_t encode_page(const std::uint8_t* raw, std::size_t raw_bytes, std::uint8_t* out,
                        std::size_t room);

/// Fill `out` with a page of so many bytes. What is behind its encoding within `in` is ignored.
/// False if that is none; `out` may have been written to then.
bool decode_page(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                 std::size_t raw_bytes);

}  // namespace attnstore::codec
