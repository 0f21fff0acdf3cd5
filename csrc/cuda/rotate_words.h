// SPDX-License-Identifier: Apache-2.0
// What one thread of the rotation kernel does. It is compiled for the host as well, where
// tests/test_rotate_words.cpp runs all threads of a grid one after the other.
//
// A row is K or V of one token and head. Where dims stand side by side, and 16 bytes are never cut,
// a word is 16 bytes of a row; in any other layout it is one element. An item is two words of a
// row, or the odd one that is left:
//
//   turning   NeoX: first dims and the dims that these turn with, which are the same words of the
//             row's two halves. GPT-J: one element each, of a pair; of 16 bytes each, whole pairs,
//             from the first and the second half of what turns
//   others    the dims that do not turn, and V: from the first and the second half of them
//
// The items of all tokens are numbered [layer][token][head][K, V][item]. Thread t of n takes the
// items t, t + n, t + 2n, ...: neighbours take neighbouring words, so accesses are coalesced, and a
// few words are on their way at once.
#pragma once

#include <cstdint>

#include "cuda/copy_words.h"
#include "rotate/page_content.h"
#include "rotate/rotation.h"

namespace attnstore {

constexpr std::uint32_t kItemsInFlight = 2;    // of one thread; two words each
constexpr std::uint32_t kItemsMax = 1U << 31;  // of one job, so that 32-bit numbers suffice
constexpr std::uint32_t kNoTurn = 0xFFFFFFFFU;

// One token that goes to another place, as it lies in the table in the device's memory.
struct alignas(8) TokenMove {
  std::uint32_t slot;
  std::uint32_t page;    // of the chunk
  std::uint32_t source;  // token of the page
  std::uint32_t block_id;
  std::uint32_t target;  // token of the block
  std::uint32_t turn;    // which of the table's turns K makes; kNoTurn: K is copied as well
};

// How the words of a row are put into items.
struct RowItems {
  std::uint32_t num_turning;    // items, which come first
  std::uint32_t num_items;      // all of them
  std::uint32_t turning_words;  // which come first
  std::uint32_t num_words;
};

// The arrays are in the memory of whoever runs it.
struct RotateJob {
  PageMap map;
  ContentMap content;
  RowItems key;
  RowItems value;
  Pairing pairing;
  Pairing word_pairing;  // kGptj: two words that follow each other are one item
  const TokenMove* tokens;
  const float* angles;         // of each turn num_pairs cosines, then as many sines
  std::uint32_t angle_stride;  // floats from one turn to the next, a multiple of four
  std::uint32_t num_pairs;
  std::uint32_t num_tokens;
  std::uint32_t first_layer;
  std::uint32_t items_per_token;
  std::uint32_t num_items;  // of all tokens in all layers of the job; at most kItemsMax
};

struct WordNumbers {
  std::uint32_t first;
  std::uint32_t second;
  bool has_second;
};

ATTNSTORE_HOST_DEVICE inline WordNumbers words_of(const RowItems& row, Pairing word_pairing,
                                                  std::uint32_t item) {
  const bool turns = item < row.num_turning;
  const std::uint32_t skipped = turns ? 0 : row.turning_words;
  const std::uint32_t stop = turns ? row.turning_words : row.num_words;
  const std::uint32_t half = turns ? row.num_turning : row.num_items - row.num_turning;
  const DimPair words =
      pair_dims(turns ? word_pairing : Pairing::kNeox, half, turns ? item : item - row.num_turning);
  const std::uint32_t first = skipped + static_cast<std::uint32_t>(words.first);
  const std::uint32_t second = skipped + static_cast<std::uint32_t>(words.second);
  if (second >= stop) return {first, first, false};
  return {first, second, true};
}

// As token_offset and dim_offset have it, mostly without their divisions.
ATTNSTORE_HOST_DEVICE inline std::int64_t token_at(const ContentSide& side, std::uint32_t token) {
  return token < side.token_group ? token * side.token_inner : token_offset(side, token);
}

ATTNSTORE_HOST_DEVICE inline std::int64_t dim_at(const ContentSide& side, std::uint32_t dim) {
  return dim < side.dim_group ? dim * side.dim_inner : dim_offset(side, dim);
}

struct RotateItem {
  std::uint64_t source[2] = {0, 0};
  std::uint64_t target[2] = {0, 0};
  const float* cosines = nullptr;  // of the first word's pairs; null: the words are copied
  bool has_second = false;
};

template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE inline RotateItem find_item(const RotateJob& job, std::uint32_t number) {
  constexpr std::uint32_t kBytes = sizeof(typename Element::Bits);
  constexpr std::uint32_t kLanes = sizeof(Word) / kBytes;
  const std::uint32_t of_tokens = number / job.items_per_token;
  const std::uint32_t in_token = number % job.items_per_token;
  const std::uint32_t layer = job.first_layer + of_tokens / job.num_tokens;
  const TokenMove token = job.tokens[of_tokens % job.num_tokens];
  const std::uint32_t per_head = job.key.num_items + job.value.num_items;
  const std::uint32_t head = in_token / per_head;
  const std::uint32_t in_head = in_token % per_head;
  const bool is_key = in_head < job.key.num_items;
  const RowItems& row = is_key ? job.key : job.value;
  const ContentSide& side = is_key ? job.content.key : job.content.value;
  const std::uint32_t item = is_key ? in_head : in_head - job.key.num_items;
  const WordNumbers words = words_of(row, job.word_pairing, item);

  RotateItem found;
  found.has_second = words.has_second;
  if (item < row.num_turning && token.turn != kNoTurn) {
    const bool is_across = kLanes == 1 || job.pairing == Pairing::kNeox;
    const std::uint32_t pair = is_across ? item * kLanes : item * (kLanes / 2);
    found.cosines = job.angles + static_cast<std::uint64_t>(token.turn) * job.angle_stride + pair;
  }
  const PageCopy copy{token.slot, token.page, token.block_id};
  const std::int64_t head_at = side.base + head * side.head_step;
  const std::uint64_t page = run_address(job.map, Place::kSlot, copy, 0, layer, 0);
  const auto run_bytes = static_cast<std::uint32_t>(job.map.run_bytes);
  const std::uint32_t numbers[2] = {words.first, words.second};
  ATTNSTORE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const std::int64_t at = head_at + dim_at(side, numbers[i] * kLanes);
    const std::int64_t source = at + token_at(side, token.source);
    const std::int64_t target = at + token_at(side, token.target);
    found.source[i] = page + static_cast<std::uint64_t>(source) * kBytes;
    const std::uint32_t in_page = static_cast<std::uint32_t>(target) * kBytes;
    const std::uint32_t run = in_page < run_bytes ? 0 : in_page / run_bytes;
    found.target[i] =
        run_address(job.map, Place::kBlock, copy, 0, layer, run) + (in_page - run * run_bytes);
  }
  return found;
}

// ---- the elements of a word: the first is its lowest bits

template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE typename Element::Bits get_lane(const Word& word,
                                                                              std::uint32_t lane) {
  using Bits = typename Element::Bits;
  if constexpr (sizeof(Word) == sizeof(Bits)) {
    return word;
  } else if constexpr (sizeof(Bits) == 4) {
    return word.parts[lane];
  } else {
    return static_cast<Bits>(word.parts[lane / 2] >> (16 * (lane % 2)));
  }
}

template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE void set_lane(Word* word, std::uint32_t lane,
                                                            typename Element::Bits bits) {
  if constexpr (sizeof(Word) == sizeof(bits)) {
    *word = bits;
  } else if constexpr (sizeof(bits) == 4) {
    word->parts[lane] = bits;
  } else {
    const std::uint32_t shift = 16 * (lane % 2);
    const std::uint32_t other = word->parts[lane / 2] & ~(0xFFFFU << shift);
    word->parts[lane / 2] = other | static_cast<std::uint32_t>(bits) << shift;
  }
}

template <std::uint32_t kCount>
struct alignas(kCount < 4 ? 4 * kCount : 16) Floats {
  float at[kCount];
};

template <std::uint32_t kCount>
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE Floats<kCount> load_floats(const float* address) {
  return *reinterpret_cast<const Floats<kCount>*>(address);
}

// Pairs of which one word has the first dims and the other the second.
template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE void turn_across(const float* cosines,
                                                               const float* sines, Word* first,
                                                               Word* second) {
  using Bits = typename Element::Bits;
  constexpr std::uint32_t kLanes = sizeof(Word) / sizeof(Bits);
  const Floats<kLanes> cosine = load_floats<kLanes>(cosines);
  const Floats<kLanes> sine = load_floats<kLanes>(sines);
  ATTNSTORE_UNROLL
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    Bits y1 = 0;
    Bits y2 = 0;
    rotate_pair<Element>(get_lane<Element>(*first, lane), get_lane<Element>(*second, lane),
                         cosine.at[lane], sine.at[lane], &y1, &y2);
    set_lane<Element>(first, lane, y1);
    set_lane<Element>(second, lane, y2);
  }
}

// Pairs that are in one word.
template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE void turn_within(const float* cosines,
                                                               const float* sines, Word* word) {
  using Bits = typename Element::Bits;
  constexpr std::uint32_t kPairs = sizeof(Word) / sizeof(Bits) / 2;
  const Floats<kPairs> cosine = load_floats<kPairs>(cosines);
  const Floats<kPairs> sine = load_floats<kPairs>(sines);
  ATTNSTORE_UNROLL
  for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
    Bits y1 = 0;
    Bits y2 = 0;
    rotate_pair<Element>(get_lane<Element>(*word, 2 * pair), get_lane<Element>(*word, 2 * pair + 1),
                         cosine.at[pair], sine.at[pair], &y1, &y2);
    set_lane<Element>(word, 2 * pair, y1);
    set_lane<Element>(word, 2 * pair + 1, y2);
  }
}

template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE inline void turn_item(const RotateJob& job, const RotateItem& item,
                                            Word* first, Word* second) {
  constexpr std::uint32_t kLanes = sizeof(Word) / sizeof(typename Element::Bits);
  const float* const cosines = item.cosines;
  if (cosines == nullptr) return;
  const float* const sines = cosines + job.num_pairs;
  if (kLanes == 1 || job.pairing == Pairing::kNeox) {
    turn_across<Element>(cosines, sines, first, second);
    return;
  }
  if constexpr (kLanes > 1) {
    const std::uint32_t apart = job.key.num_turning * (kLanes / 2);
    turn_within<Element>(cosines, sines, first);
    if (item.has_second) turn_within<Element>(cosines + apart, sines + apart, second);
  }
}

template <typename Element, typename Word>
ATTNSTORE_HOST_DEVICE inline void rotate_words(const RotateJob& job, std::uint32_t thread,
                                               std::uint32_t num_threads) {
  for (std::uint32_t first = thread; first < job.num_items; first += num_threads * kItemsInFlight) {
    RotateItem items[kItemsInFlight];
    Word words[kItemsInFlight][2] = {};
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kItemsInFlight; ++i) {
      const std::uint32_t number = first + i * num_threads;
      if (number >= job.num_items) continue;
      items[i] = find_item<Element, Word>(job, number);
      words[i][0] = load_word<Word>(items[i].source[0]);
      if (items[i].has_second) words[i][1] = load_word<Word>(items[i].source[1]);
    }
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kItemsInFlight; ++i) {
      if (first + i * num_threads >= job.num_items) continue;
      turn_item<Element>(job, items[i], &words[i][0], &words[i][1]);
      store_word<Word>(items[i].target[0], words[i][0]);
      if (items[i].has_second) store_word<Word>(items[i].target[1], words[i][1]);
    }
  }
}

}  // namespace attnstore
