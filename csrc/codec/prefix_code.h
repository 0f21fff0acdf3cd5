// SPDX-License-Identifier: Apache-2.0
// A Huffman code of bytes, its codes 11 bits long at most, in four streams that are read side by
// side. A table entry decodes up to four bytes at once, since exponents of KV take 2 to 3 bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace attnstore::codec {

constexpr unsigned kCodeBits = 11;
constexpr std::size_t kTableSize = std::size_t{1} << kCodeBits;
constexpr std::size_t kStreams = 4;
constexpr std::size_t kSlack = 32;
/// Bytes behind each stream's output that decode_streams() may write to.

using Counts = std::array<std::uint32_t, 256>;
using Lengths = std::array<std::uint8_t, 256>;
/// Bits of each byte's code; 0: it has none.

/// How often each byte is there.
Counts count_bytes(const std::uint8_t* data, std::size_t size);

/// The lengths of a complete code of at least two bytes, the shortest up to kCodeBits.
Lengths code_lengths(const Counts& counts);

/// Bytes that all of `data` takes in one stream, with what write_stream() writes behind it.
std::size_t stream_bytes(const std::uint8_t* data, std::size_t size, const Lengths& lengths);

struct Code {
  std::uint64_t bits;  // from the highest bit
  unsigned length;
};
std::array<Code, 256> assign_codes(const Lengths& lengths);

/// Write the codes of `data`. Returns the end. The 8 bytes behind it may be written to.
std::uint8_t* write_stream(const std::uint8_t* data, std::size_t size,
                           const std::array<Code, 256>& codes, std::uint8_t* out);

struct Entry {
  std::array<std::uint8_t, 4> bytes;
  std::uint8_t bits;        // of the codes of all `count` bytes
  std::uint8_t count;       // 1 to 4
  std::uint8_t first_bits;  // of the first byte's code
  std::uint8_t zero;
};
static_assert(sizeof(Entry) == 8);
using Table = std::array<Entry, kTableSize>;

/// The table of a code. False if the lengths are not those of a complete code.
bool make_table(const Lengths& lengths, Table& table);

struct Stream {
  const std::uint8_t* in;
  std::size_t in_size;
  std::uint8_t* out;  // kSlack more bytes than `out_size`
  std::size_t out_size;
};

/// Decode all four. Reads nothing outside of a stream's input. False if a stream does not end where
/// its bytes do.
bool decode_streams(const Table& table, const std::array<Stream, kStreams>& streams);

}  // namespace attnstore::codec
