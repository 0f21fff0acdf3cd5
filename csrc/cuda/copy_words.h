// SPDX-License-Identifier: Apache-2.0
// What one thread of the copy kernel does. It is compiled for the host as well, where
// tests/test_copies.cpp runs all threads of a grid one after the other.
//
// The words of all pages are numbered [layer][page][run][word]. Thread t of n takes the words t,
// t + n, t + 2n, ...: neighbours take neighbouring words, so accesses are coalesced whatever the
// length of a run, and a few words are on their way at once.
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
using Word4 = std::uint32_t;
using Word1 = std::uint8_t;

constexpr std::uint32_t kThreadsPerBlock = 256;
constexpr std::uint32_t kWordsInFlight = 4;    // of one thread
constexpr std::uint32_t kWordsMax = 1U << 31;  // of one job, so that 32-bit numbers suffice
constexpr std::uint32_t kGridThreadsMax = 1U << 20;

// The arrays are in the memory of whoever runs it. `rows` is null where no row takes part.
struct CopyJob {
  PageMap map;
  Place source;
  Place target;
  const PageCopy* copies;
  const std::int64_t* rows;
  std::uint32_t num_copies;
  std::uint32_t first_layer;
  std::uint32_t words_per_run;
  std::uint32_t words_per_page;
  std::uint32_t num_words;  // of all pages in all layers of the job; at most kWordsMax
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

struct WordAddresses {
  std::uint64_t source;
  std::uint64_t target;
};

template <typename Word>
ATTNSTORE_HOST_DEVICE inline WordAddresses word_addresses(const CopyJob& job, std::uint32_t word) {
  const std::uint32_t page = word / job.words_per_page;
  const std::uint32_t in_page = word % job.words_per_page;
  const std::uint32_t layer = job.first_layer + page / job.num_copies;
  const std::uint32_t at = page % job.num_copies;
  const std::uint32_t run = in_page / job.words_per_run;
  const std::uint64_t in_run =
      in_page % job.words_per_run * static_cast<std::uint64_t>(sizeof(Word));
  const PageCopy copy = job.copies[at];
  const std::int64_t row = job.rows == nullptr ? 0 : job.rows[at];
  return {run_address(job.map, job.source, copy, row, layer, run) + in_run,
          run_address(job.map, job.target, copy, row, layer, run) + in_run};
}

template <typename Word>
ATTNSTORE_HOST_DEVICE inline void copy_words(const CopyJob& job, std::uint32_t thread,
                                             std::uint32_t num_threads) {
  for (std::uint32_t first = thread; first < job.num_words; first += num_threads * kWordsInFlight) {
    WordAddresses addresses[kWordsInFlight];
    Word words[kWordsInFlight];
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
      const std::uint32_t word = first + i * num_threads;
      if (word < job.num_words) addresses[i] = word_addresses<Word>(job, word);
    }
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
      if (first + i * num_threads < job.num_words) words[i] = load_word<Word>(addresses[i].source);
    }
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) {
      if (first + i * num_threads < job.num_words) store_word<Word>(addresses[i].target, words[i]);
    }
  }
}

}  // namespace attnstore
