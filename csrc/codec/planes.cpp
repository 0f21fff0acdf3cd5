// SPDX-License-Identifier: Apache-2.0
#include "codec/planes.h"

#include <cstring>

namespace attnstore::codec {

namespace {

template <class Word>
Word get(const std::uint8_t* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

template <class Word>
void put(std::uint8_t* at, Word word) {
  std::memcpy(at, &word, sizeof word);
}

void split_2(const std::uint8_t* raw, std::size_t num_words, std::uint8_t* __restrict top,
             std::uint8_t* __restrict low) {
  for (std::size_t i = 0; i < num_words; ++i) {
    const auto word = get<std::uint16_t>(raw + 2 * i);
    const auto turned = static_cast<std::uint16_t>(word << 1 | word >> 15);
    top[i] = static_cast<std::uint8_t>(turned >> 8);
    low[i] = static_cast<std::uint8_t>(turned);
  }
}

void split_4(const std::uint8_t* raw, std::size_t num_words, std::uint8_t* __restrict top,
             std::uint8_t* __restrict low, std::uint8_t* __restrict third) {
  for (std::size_t i = 0; i < num_words; ++i) {
    const auto word = get<std::uint32_t>(raw + 4 * i);
    const std::uint32_t turned = word << 1 | word >> 31;
    top[i] = static_cast<std::uint8_t>(turned >> 24);
    third[i] = static_cast<std::uint8_t>(turned >> 16);
    put(low + 2 * i, static_cast<std::uint16_t>(turned));
  }
}

void merge_2(const std::uint8_t* top, const std::uint8_t* low, std::size_t count,
             std::uint8_t* __restrict out) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto turned = static_cast<std::uint16_t>(top[i] << 8 | low[i]);
    put(out + 2 * i, static_cast<std::uint16_t>(turned >> 1 | turned << 15));
  }
}

void merge_4(const std::uint8_t* top, const std::uint8_t* low, const std::uint8_t* third,
             std::size_t count, std::uint8_t* __restrict out) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t turned = static_cast<std::uint32_t>(top[i]) << 24 |
                                 static_cast<std::uint32_t>(third[i]) << 16 |
                                 get<std::uint16_t>(low + 2 * i);
    put(out + 4 * i, turned >> 1 | turned << 31);
  }
}

}  // namespace

void split(const std::uint8_t* raw, std::size_t num_words, std::size_t word, std::uint8_t* top,
           std::uint8_t* low) {
  if (word == 1) {
    std::memcpy(top, raw, num_words);
  } else if (word == 2) {
    split_2(raw, num_words, top, low);
  } else {
    split_4(raw, num_words, top, low, low + 2 * num_words);
  }
}

void merge(const std::uint8_t* top, const std::uint8_t* low, std::size_t first, std::size_t count,
           std::size_t num_words, std::size_t word, std::uint8_t* out) {
  if (word == 1) {
    std::memcpy(out + first, top, count);
  } else if (word == 2) {
    merge_2(top, low + first, count, out + 2 * first);
  } else {
    merge_4(top, low + 2 * first, low + 2 * num_words + first, count, out + 4 * first);
  }
}

}  // namespace attnstore::codec
