// SPDX-License-Identifier: Apache-2.0
// What one thread of the copy kernel does. It is compiled for the host as well, where
// tests/test_copies.cpp runs all threads of a grid one after the other.
//
// A run is cut into pieces, which are numbered [layer][page][run][piece]. A group of lanes copies a
// piece: lane l of n takes its words l, l + n, l + 2n, ...: neighbours take neighbouring words, so
// accesses are coalesced, and all of a lane's words are on their way at once. Addresses are worked
// out once for a piece. Short runs have small groups, so that few lanes have nothing to do.
#pragma once

#include <cstdint>

#include "copy/page_map.h"

#if defined(__CUDA_ARCH__)
#define ATTNSTORE_UNROLL _Pragma("unroll")
#else
#define ATTNSTORE_UNROLL
#endif

namespace attnstore {

// The widest access is 128 bits.
struct alignas(16) Word16 {
  std::uint32_t parts[4];
};
struct alignas(8) Word8 {
  std::uint32_t parts[2];
};
using Word4 = std::uint32_t;
using Word1 = std::uint8_t;

constexpr std::uint32_t kThreadsPerBlock = 128;
constexpr std::uint32_t kLanesMax = 32;
constexpr std::uint32_t kWordsInFlight = 4;  // of one thread
// Lanes of a group: with 16 bytes each they take a line of 128 bytes at once.
template <typename Word>
constexpr std::uint32_t kLanes = sizeof(Word) == 16 ? 8 : kLanesMax;
template <typename Word>
constexpr std::uint32_t kPieceWords = kLanes<Word> * kWordsInFlight;
constexpr std::uint32_t kPiecesMax = 1U << 30;  // of one job, so that 32-bit numbers suffice
constexpr std::uint32_t kGridThreadsMax = 1U << 20;

// Divides by a number that all threads have in common, without a division: for n below 2^31, n / d
// is n times factor / 2^(31 + shift), exactly (Granlund and Montgomery, PLDI 1994).
struct Divisor {
  std::uint32_t divisor;
  std::uint32_t factor;
  std::uint32_t shift;
};

// `divisor` is at least 1 and at most 2^31.
inline Divisor divide_by(std::uint32_t divisor) {
  std::uint32_t shift = 0;
  while ((std::uint64_t{1} << shift) < divisor) ++shift;
  const std::uint64_t power = std::uint64_t{1} << (31 + shift);
  return {divisor, static_cast<std::uint32_t>((power + divisor - 1) / divisor), shift};
}

ATTNSTORE_HOST_DEVICE inline std::uint32_t quotient(std::uint32_t number, const Divisor& by) {
  const std::uint64_t product = static_cast<std::uint64_t>(2 * number) * by.factor;
  return static_cast<std::uint32_t>(product >> 32) >> by.shift;
}

// Of both sides of a copy, in bytes.
struct alignas(16) Offsets {
  std::uint64_t source;
  std::uint64_t target;
};

ATTNSTORE_HOST_DEVICE inline Offsets operator+(const Offsets& a, const Offsets& b) {
  return {a.source + b.source, a.target + b.target};
}

// A run is at pages[page] + layers[layer] + runs[run], on both sides. The arrays are in the memory
// of whoever runs it.
struct CopyJob {
  const Offsets* pages;   // addresses of their first runs in layer 0
  const Offsets* layers;  // from layer 0; the job's first layer is the first of them
  const Offsets* runs;    // from a page's first one
  Divisor num_pages;
  Divisor pieces_per_page;
  Divisor pieces_per_run;
  std::uint32_t words_per_run;
  std::uint32_t num_pieces;  // of all pages in all layers of the job; at most kPiecesMax
};

// Copied bytes are not read again soon, so they are not to push others out of the caches.
template <typename Word>
ATTNSTORE_HOST_DEVICE inline Word load_word(std::uint64_t address) {
#if defined(__CUDA_ARCH__)
  return __ldcs(reinterpret_cast<const Word*>(address));
#else
  return *reinterpret_cast<const Word*>(address);
#endif
}

template <typename Word>
ATTNSTORE_HOST_DEVICE inline void store_word(std::uint64_t address, Word word) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<Word*>(address), word);
#else
  *reinterpret_cast<Word*>(address) = word;
#endif
}

#if defined(__CUDACC__)
template <>
ATTNSTORE_HOST_DEVICE inline Word8 load_word<Word8>(std::uint64_t address) {
#if defined(__CUDA_ARCH__)
  const uint2 got = __ldcs(reinterpret_cast<const uint2*>(address));
  return {{got.x, got.y}};
#else
  return *reinterpret_cast<const Word8*>(address);
#endif
}

template <>
ATTNSTORE_HOST_DEVICE inline void store_word<Word8>(std::uint64_t address, Word8 word) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<uint2*>(address), make_uint2(word.parts[0], word.parts[1]));
#else
  *reinterpret_cast<Word8*>(address) = word;
#endif
}

template <>
ATTNSTORE_HOST_DEVICE inline Word16 load_word<Word16>(std::uint64_t address) {
#if defined(__CUDA_ARCH__)
  const uint4 got = __ldcs(reinterpret_cast<const uint4*>(address));
  return {{got.x, got.y, got.z, got.w}};
#else
  return *reinterpret_cast<const Word16*>(address);
#endif
}

template <>
ATTNSTORE_HOST_DEVICE inline void store_word<Word16>(std::uint64_t address, Word16 word) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<uint4*>(address),
         make_uint4(word.parts[0], word.parts[1], word.parts[2], word.parts[3]));
#else
  *reinterpret_cast<Word16*>(address) = word;
#endif
}
#endif

template <typename Word>
ATTNSTORE_HOST_DEVICE inline void copy_piece(const CopyJob& job, std::uint32_t piece,
                                             std::uint32_t lane) {
  const std::uint32_t of_layers = quotient(piece, job.pieces_per_page);
  const std::uint32_t in_page = piece - of_layers * job.pieces_per_page.divisor;
  const std::uint32_t layer = quotient(of_layers, job.num_pages);
  const std::uint32_t page = of_layers - layer * job.num_pages.divisor;
  const std::uint32_t run = quotient(in_page, job.pieces_per_run);
  const std::uint32_t in_run = in_page - run * job.pieces_per_run.divisor;
  const std::uint32_t first = in_run * kPieceWords<Word> + lane;
  const std::uint64_t skipped = first * static_cast<std::uint64_t>(sizeof(Word));
  const Offsets at = job.pages[page] + job.layers[layer] + job.runs[run];
  const std::uint64_t source = at.source + skipped;
  const std::uint64_t target = at.target + skipped;
  Word words[kWordsInFlight] = {};  // else they stay in registers for the next piece
  ATTNSTORE_UNROLL
  for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
    const std::uint32_t ahead = i * kLanes<Word>;
    if (first + ahead < job.words_per_run)
      words[i] = load_word<Word>(source + ahead * sizeof(Word));
  }
  ATTNSTORE_UNROLL
  for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
    const std::uint32_t ahead = i * kLanes<Word>;
    if (first + ahead < job.words_per_run)
      store_word<Word>(target + ahead * sizeof(Word), words[i]);
  }
}

// `num_threads` is a multiple of kLanesMax.
template <typename Word>
ATTNSTORE_HOST_DEVICE inline void copy_words(const CopyJob& job, std::uint32_t thread,
                                             std::uint32_t num_threads) {
  const std::uint32_t groups = num_threads / kLanes<Word>;
  for (std::uint32_t piece = thread / kLanes<Word>; piece < job.num_pieces; piece += groups) {
    copy_piece<Word>(job, piece, thread % kLanes<Word>);
  }
}

}  // namespace attnstore
