// SPDX-License-Identifier: Apache-2.0
#include "codec/page_codec.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace attnstore::codec {

namespace {

constexpr std::size_t kWord = 2;
constexpr std::size_t kPacked = 8;  // codes that share a word
constexpr std::size_t kPackedBytes = 3;
constexpr unsigned kEscape = 7;          // the code of numbers that have none
constexpr unsigned kBaseMost = 255 - 6;  // of the last code that is none of an escape
constexpr std::uint64_t kOnes = 0x0101010101010101U;
constexpr std::size_t kTables = 4;  // numbers that follow each other often have one exponent

using Group = std::array<std::uint8_t, kGroupNumbers>;
using Table = std::array<std::uint16_t, 256>;

/// Where the parts of a page are.
struct Parts {
  explicit Parts(std::size_t raw_bytes)
      : numbers(raw_bytes / kWord),
        groups((numbers + kGroupNumbers - 1) / kGroupNumbers),
        codes(numbers),
        bases(codes + (numbers + kPacked - 1) / kPacked * kPackedBytes),
        counts(bases + groups),
        escapes(counts + groups) {}

  [[nodiscard]] std::size_t of_group(std::size_t group) const {
    return std::min(kGroupNumbers, numbers - group * kGroupNumbers);
  }

  const std::size_t numbers;
  const std::size_t groups;
  const std::size_t codes;
  const std::size_t bases;
  const std::size_t counts;
  const std::size_t escapes;
};

bool is_page(std::size_t raw_bytes) { return raw_bytes != 0 && raw_bytes % kWord == 0; }

/// 8 codes, a byte each, to 3 bits each.
std::uint64_t packed(std::uint64_t codes) {
  codes = (codes | codes >> 5) & 0x003f003f003f003fU;
  codes = (codes | codes >> 10) & 0x00000fff00000fffU;
  return (codes | codes >> 20) & 0xffffffU;
}

std::uint64_t unpacked(std::uint64_t bits) {
  bits = (bits | bits << 20) & 0x00000fff00000fffU;
  bits = (bits | bits << 10) & 0x003f003f003f003fU;
  return (bits | bits << 5) & 0x0707070707070707U;
}

/// A bit for each of 8 codes, the lowest of its byte: whether it is that of an escape.
std::uint64_t escapes_in(std::uint64_t codes) { return codes & codes >> 1 & codes >> 2 & kOnes; }

/// Their places among 64 numbers as bits, so that a loop over them seldom ends otherwise than the
/// processor foresees.
std::uint64_t places_of(std::uint64_t escapes, std::size_t at) {
  return escapes * 0x0102040810204080U >> 56 << at % 64;
}

/// GCC and Clang alone: as all that we build with.
std::size_t first_in(std::uint64_t places) {
  return static_cast<std::size_t>(__builtin_ctzll(places));
}

void split(const std::uint8_t* __restrict raw, std::size_t count, std::uint8_t* __restrict top,
           std::uint8_t* __restrict low) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t number = 0;
    std::memcpy(&number, raw + kWord * i, sizeof number);
    top[i] = static_cast<std::uint8_t>(number >> 7);
    low[i] = static_cast<std::uint8_t>((number & 0x7f) | (number >> 8 & 0x80));
  }
}

void join(const std::uint8_t* __restrict top, const std::uint8_t* __restrict low, std::size_t count,
          std::uint8_t* __restrict raw) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto number =
        static_cast<std::uint16_t>((low[i] & 0x80) << 8 | top[i] << 7 | (low[i] & 0x7f));
    std::memcpy(raw + kWord * i, &number, sizeof number);
  }
}

/// Args: tables: all 0, and again on return.
unsigned base_of(const Group& top, std::size_t count, std::array<Table, kTables>* tables) {
  const auto begin = top.begin();
  const auto end = begin + static_cast<std::ptrdiff_t>(count);
  std::uint8_t least = 255;
  std::uint8_t most = 0;
  for (auto at = begin; at != end; ++at) {
    least = std::min(least, *at);
    most = std::max(most, *at);
  }
  if (most - least < static_cast<int>(kEscape)) return std::min<unsigned>(least, kBaseMost);
  for (std::size_t i = 0; i < count; ++i) ++(*tables)[i % kTables][top[i]];
  unsigned covered = 0;
  unsigned best = 0;
  unsigned base = least;
  std::array<std::uint16_t, 256> counts;
  for (unsigned exponent = least; exponent <= most; ++exponent) {
    unsigned of_all = 0;
    for (Table& table : *tables) {
      of_all += table[exponent];
      table[exponent] = 0;
    }
    counts[exponent] = static_cast<std::uint16_t>(of_all);
    covered += of_all;
    if (exponent < least + kEscape - 1) continue;
    const unsigned first = exponent - (kEscape - 1);
    if (first > least) covered -= counts[first - 1];
    if (covered > best) {
      best = covered;
      base = first;
    }
  }
  return base;
}

/// Write the codes of a group, and the exponents of its escapes. Returns how many those are.
std::size_t put_codes(const Group& top, std::size_t count, unsigned base, std::uint8_t* out,
                      Group* escapes) {
  std::array<std::uint64_t, kGroupNumbers / 64> places{};
  alignas(8) Group codes{};
  for (std::size_t i = 0; i < count; ++i) {
    const auto code = static_cast<std::uint8_t>(top[i] - base);
    codes[i] = std::min<std::uint8_t>(code, kEscape);
  }
  for (std::size_t at = 0; at < count; at += kPacked, out += kPackedBytes) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, codes.data() + at, sizeof eight);
    places[at / 64] |= places_of(escapes_in(eight), at);
    const std::uint64_t bits = packed(eight);
    out[0] = static_cast<std::uint8_t>(bits);
    out[1] = static_cast<std::uint8_t>(bits >> 8);
    out[2] = static_cast<std::uint8_t>(bits >> 16);
  }
  std::size_t found = 0;
  for (std::size_t part = 0; part < places.size(); ++part) {
    for (std::uint64_t left = places[part]; left != 0; left &= left - 1) {
      (*escapes)[found++] = top[part * 64 + first_in(left)];
    }
  }
  return found;
}

/// The exponents of a group. False if it has not just so many escapes.
bool get_tops(const std::uint8_t* codes, std::size_t count, unsigned base,
              const std::uint8_t* escapes, std::size_t num_escapes, Group* top) {
  std::array<std::uint64_t, kGroupNumbers / 64> places{};
  for (std::size_t at = 0; at < count; at += kPacked, codes += kPackedBytes) {
    // Not by memcpy into a word: that would be read before its bytes are together.
    const std::uint64_t bits = codes[0] | static_cast<std::uint64_t>(codes[1]) << 8 |
                               static_cast<std::uint64_t>(codes[2]) << 16;
    const std::uint64_t eight = unpacked(bits);
    const std::uint64_t ours = escapes_in(eight);
    const std::uint64_t tops = (eight & ~(ours * kEscape)) + base * kOnes;  // none beyond 255
    std::memcpy(top->data() + at, &tops, sizeof tops);
    places[at / 64] |= places_of(ours, at);
  }
  std::size_t found = 0;
  for (std::size_t part = 0; part < places.size(); ++part) {
    for (std::uint64_t left = places[part]; left != 0; left &= left - 1) {
      if (found == num_escapes) return false;
      (*top)[part * 64 + first_in(left)] = escapes[found++];
    }
  }
  return found == num_escapes;
}

}  // namespace

std::size_t encode_page(const std::uint8_t* raw, std::size_t raw_bytes, std::uint8_t* out,
                        std::size_t room) {
  const Parts parts(raw_bytes);
  if (!is_page(raw_bytes) || parts.escapes > room) return 0;
  std::array<Table, kTables> tables{};
  std::size_t end = parts.escapes;
  for (std::size_t group = 0; group < parts.groups; ++group) {
    const std::size_t first = group * kGroupNumbers;
    const std::size_t count = parts.of_group(group);
    Group top;
    split(raw + kWord * first, count, top.data(), out + first);
    const unsigned base = base_of(top, count, &tables);
    Group escapes;
    const std::size_t num_escapes =
        put_codes(top, count, base, out + parts.codes + first / kPacked * kPackedBytes, &escapes);
    if (num_escapes > room - end) return 0;
    out[parts.bases + group] = static_cast<std::uint8_t>(base);
    out[parts.counts + group] = static_cast<std::uint8_t>(num_escapes);
    std::memcpy(out + end, escapes.data(), num_escapes);
    end += num_escapes;
  }
  return end;
}

bool decode_page(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                 std::size_t raw_bytes) {
  const Parts parts(raw_bytes);
  if (!is_page(raw_bytes) || parts.escapes > in_bytes) return false;
  std::size_t end = parts.escapes;
  for (std::size_t group = 0; group < parts.groups; ++group) {
    const std::size_t first = group * kGroupNumbers;
    const std::size_t count = parts.of_group(group);
    const unsigned base = in[parts.bases + group];
    const std::size_t num_escapes = in[parts.counts + group];
    if (base > kBaseMost || num_escapes > in_bytes - end) return false;
    Group top;
    const std::uint8_t* const codes = in + parts.codes + first / kPacked * kPackedBytes;
    if (!get_tops(codes, count, base, in + end, num_escapes, &top)) return false;
    join(top.data(), in + first, count, out + kWord * first);
    end += num_escapes;
  }
  return true;
}

}  // namespace attnstore::codec
