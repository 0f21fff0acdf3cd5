// SPDX-License-Identifier: Apache-2.0
#include "codec/packed.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "codec/lossless.h"
#include "codec/planes.h"
#include "codec/prefix_code.h"

namespace attnstore::codec {

namespace {

constexpr std::size_t kWord = 2;
constexpr std::size_t kCodes = 16;      // exponents that have one
constexpr std::size_t kHead = 3;        // first exponent, number of escapes
constexpr std::size_t kPerEscape = 3;   // its place and its exponent
constexpr std::size_t kSamples = 1024;  // words by which the window is chosen
constexpr std::size_t kMaxWords = kBlockBytes / kWord;

struct Work {
  std::array<std::uint8_t, kMaxWords> top;
  std::array<std::uint16_t, kMaxWords + 1> places;
};

Work& work() {
  thread_local const auto mine = std::make_unique<Work>();
  return *mine;
}

std::uint8_t* put_16(std::uint8_t* out, std::size_t number) {
  out[0] = static_cast<std::uint8_t>(number);
  out[1] = static_cast<std::uint8_t>(number >> 8);
  return out + 2;
}

std::size_t get_16(const std::uint8_t* in) { return in[0] | static_cast<std::size_t>(in[1]) << 8; }

struct Window {
  std::uint8_t first;
  double part;  // of the words that it does not cover
};

/// The consecutive exponents that cover the most of a few words.
Window best_window(const std::uint8_t* raw, std::size_t num_words) {
  // Odd, so that it meets all channels: there is a power of two of them.
  const std::size_t step = num_words / kSamples | 1;
  Counts counts{};
  std::uint32_t total = 0;
  for (std::size_t i = 0; i < num_words; i += step, ++total) {
    ++counts[top_of(raw + i * kWord, kWord)];
  }
  std::uint32_t covered = 0;
  std::uint32_t most = 0;
  std::size_t lowest = 0;
  std::size_t highest = 0;
  for (std::size_t end = 0; end < counts.size(); ++end) {
    covered += counts[end];
    if (end >= kCodes) covered -= counts[end - kCodes];
    if (end + 1 < kCodes) continue;
    const std::size_t first = end + 1 - kCodes;
    if (covered > most) {
      most = covered;
      lowest = highest = first;
    } else if (covered == most && first == highest + 1) {
      highest = first;
    }
  }
  // The middle of equal ones: both the smallest and the largest numbers are rare.
  return {static_cast<std::uint8_t>((lowest + highest) / 2),
          1.0 - static_cast<double>(most) / total};
}

/// That of an escape is put right by its entry in the list.
unsigned code_of(std::uint8_t top, std::uint8_t first) { return (top - first) & (kCodes - 1); }

/// Codes of word j in the lower half of byte j, of word half + j in the upper one.
void put_codes(const std::uint8_t* __restrict top, std::size_t num_words, std::uint8_t first,
               std::uint8_t* __restrict out) {
  const std::size_t half = (num_words + 1) / 2;
  const std::size_t pairs = num_words / 2;
  for (std::size_t j = 0; j < pairs; ++j) {
    const unsigned upper = code_of(top[half + j], first);
    out[j] = static_cast<std::uint8_t>(code_of(top[j], first) | upper << 4);
  }
  if (pairs < half) out[pairs] = static_cast<std::uint8_t>(code_of(top[pairs], first));
}

/// Places of the words that have no code.
std::size_t find_escapes(const std::uint8_t* top, std::size_t num_words, std::uint8_t first,
                         std::uint16_t* places) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < num_words; ++i) {
    places[count] = static_cast<std::uint16_t>(i);
    count += static_cast<std::uint8_t>(top[i] - first) >= kCodes ? 1 : 0;
  }
  return count;
}

std::uint16_t joined(unsigned top, unsigned low) {
  const auto turned = static_cast<std::uint16_t>(top << 8 | low);
  return static_cast<std::uint16_t>(turned >> 1 | turned << 15);
}

/// The words of codes that are `shift` bits up in each byte.
template <unsigned shift>
void join(const std::uint8_t* __restrict codes, const std::uint8_t* __restrict low,
          std::size_t count, std::uint8_t first, std::uint8_t* __restrict out) {
  for (std::size_t j = 0; j < count; ++j) {
    const auto top = static_cast<std::uint8_t>(first + (codes[j] >> shift & 15));
    const std::uint16_t word = joined(top, low[j]);
    std::memcpy(out + kWord * j, &word, sizeof word);
  }
}

}  // namespace

std::uint8_t* pack(const std::uint8_t* raw, std::size_t num_words, std::uint8_t* out,
                   std::size_t most) {
  const std::size_t half = (num_words + 1) / 2;
  const std::size_t bulk = kHead + half + num_words;
  if (num_words == 0 || num_words > kMaxWords || bulk > most) return nullptr;
  const std::size_t room = (most - bulk) / kPerEscape;
  const Window window = best_window(raw, num_words);
  // Twice: a few words tell of all within so much.
  if (window.part * static_cast<double>(num_words) > 2.0 * static_cast<double>(room)) {
    return nullptr;
  }
  Work& w = work();
  std::uint8_t* const codes = out + kHead;
  std::uint8_t* const low = codes + half;
  split(raw, num_words, kWord, w.top.data(), low);
  const std::size_t count = find_escapes(w.top.data(), num_words, window.first, w.places.data());
  if (count > room) return nullptr;
  out[0] = window.first;
  put_16(out + 1, count);
  put_codes(w.top.data(), num_words, window.first, codes);
  out = low + num_words;
  for (std::size_t i = 0; i < count; ++i) out = put_16(out, w.places[i]);
  for (std::size_t i = 0; i < count; ++i) *out++ = w.top[w.places[i]];
  return out;
}

std::size_t unpack(const std::uint8_t* in, std::size_t in_size, std::uint8_t* out,
                   std::size_t num_words) {
  const std::size_t half = (num_words + 1) / 2;
  if (num_words == 0 || in_size < kHead) return 0;
  const std::uint8_t first = in[0];
  const std::size_t count = get_16(in + 1);
  const std::size_t size = kHead + half + num_words + kPerEscape * count;
  if (count > num_words || size > in_size) return 0;
  const std::uint8_t* const codes = in + kHead;
  const std::uint8_t* const low = codes + half;
  join<0>(codes, low, half, first, out);
  join<4>(codes, low + half, num_words - half, first, out + kWord * half);
  const std::uint8_t* const places = low + num_words;
  const std::uint8_t* const tops = places + 2 * count;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = get_16(places + 2 * i);
    if (place >= num_words) return 0;
    const std::uint16_t word = joined(tops[i], low[place]);
    std::memcpy(out + kWord * place, &word, sizeof word);
  }
  return size;
}

}  // namespace attnstore::codec
