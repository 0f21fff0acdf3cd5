// SPDX-License-Identifier: Apache-2.0
// Hashes of short windows of tokens, rolling, and a table of where stored windows stand.
//
// Both are secret: no user can make two windows collide, or choose which bucket a window falls
// into. A collision costs time and nothing else, since whoever asks compares the tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "index/prefix_index_tables.h"

namespace attnstore {

// A polynomial in a secret base modulo 2^61 - 1. Two windows that differ have the same hash with
// a probability of window / 2^61. A token is four bytes, in whatever order, always the same.
class WindowHash {
 public:
  WindowHash(std::uint64_t seed, std::uint32_t window);

  std::uint32_t window() const { return window_; }
  // Of the `window` tokens that stand there.
  std::uint64_t of(const std::uint8_t* tokens) const;
  // Of the window one token on: `leaving` is the first token of the one before it, `entering` the
  // last of the new one.
  std::uint64_t roll(std::uint64_t hash, const std::uint8_t* leaving,
                     const std::uint8_t* entering) const;

 private:
  const std::uint32_t window_;
  const std::uint64_t base_;
  const std::uint64_t leaving_factor_;  // base ^ window
};

// Places in chunks by a 64-bit hash, in buckets of a cache line. Its size is fixed.
//
// A full bucket gives up its oldest anchor. Anchors of one hash (windows with the same tokens) take
// at most half of a bucket, the newest of them: so thousands of copies of one window neither make a
// look-up slow nor push others out. With kMean anchors in a bucket on the average, one of 10,000 is
// given up while others are still there.
class AnchorTable {
 public:
  static constexpr std::size_t kSlots = 8;
  static constexpr std::size_t kEqualMax = 4;
  static constexpr std::size_t kMean = 2;

  struct Place {
    Id id;
    std::uint32_t offset;
  };
  struct Found {
    std::array<Place, kSlots> places;  // newest first
    std::size_t count = 0;
  };

  explicit AnchorTable(std::size_t expected);

  void insert(std::uint64_t hash, Place place);
  // Does nothing if the anchor was given up.
  void erase(std::uint64_t hash, Place place);
  Found find(std::uint64_t hash) const;
  void prefetch(std::uint64_t hash) const { __builtin_prefetch(&bucket(hash)); }
  void clear();
  std::size_t bytes() const { return count_ * sizeof(Bucket); }

 private:
  struct Slot {
    std::uint32_t id_plus_1;  // zero: empty, and so are those after it
    std::uint16_t offset;
    std::uint16_t tag;
  };
  using Bucket = std::array<Slot, kSlots>;  // newest first
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  static std::uint16_t tag(std::uint64_t hash) { return static_cast<std::uint16_t>(hash); }
  Bucket& bucket(std::uint64_t hash) const { return buckets_[((hash >> 32) * count_) >> 32]; }

  const std::size_t count_;
  std::unique_ptr<void, Free> memory_;
  Bucket* buckets_ = nullptr;
};

}  // namespace attnstore
