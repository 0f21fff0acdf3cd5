// SPDX-License-Identifier: Apache-2.0
// Slots and blocks of many layouts, and tokens to move between them.
#pragma once

#include <cmath>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "copy/omp_team.h"
#include "rotate/moved_tokens.h"
#include "rotate/page_rotator.h"
#include "tests/check.h"

namespace moved_world {

using attnstore::ContentSide;
using attnstore::element_offset;
using attnstore::ElementType;
using attnstore::MovedTokens;
using attnstore::PageShape;
using attnstore::Pairing;
using attnstore::RotationShape;

constexpr std::size_t kLayers = 2;
constexpr std::int64_t kSlots = 3;
constexpr std::int64_t kPages = 2;
constexpr std::int64_t kBlocks = 5;

// A team of three, as an OpenMP runtime has.
inline void three(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  std::thread threads[] = {std::thread(body, data), std::thread(body, data)};
  body(data);
  for (auto& thread : threads) thread.join();
}

inline std::int64_t below(std::mt19937_64& random, std::int64_t stop) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(stop));
}

// As KV tensors are, from a line on: whole lines are stored in another way.
template <typename Element>
struct OnLines {
  using value_type = Element;
  OnLines() = default;
  template <typename Other>
  explicit OnLines(const OnLines<Other>& /*other*/) {}
  static Element* allocate(std::size_t count) {
    return static_cast<Element*>(::operator new(count * sizeof(Element), std::align_val_t{64}));
  }
  static void deallocate(Element* at, std::size_t /*count*/) {
    ::operator delete(at, std::align_val_t{64});
  }
  bool operator==(const OnLines& /*other*/) const { return true; }
  bool operator!=(const OnLines& /*other*/) const { return false; }
};
using Bytes = std::vector<std::byte, OnLines<std::byte>>;

enum class Kind { kVec, kAmx, kRows, kRowsByToken, kApart, kOdd };
constexpr Kind kKinds[] = {Kind::kVec,         Kind::kAmx,   Kind::kRows,
                           Kind::kRowsByToken, Kind::kApart, Kind::kOdd};

inline attnstore::ContentMap content_of(Kind kind, std::int64_t heads, std::int64_t tokens,
                                        std::int64_t dims) {
  const std::int64_t half = tokens * dims;
  const std::int64_t both = 2 * half;
  switch (kind) {
    case Kind::kVec:
      return {{0, both, tokens, 0, 1, dims, 0, tokens}, {half, both, tokens, 0, dims, dims, 0, 1}};
    case Kind::kAmx:
      return {{0, both, 16, 16 * dims, 2, 2, 32, 1}, {half, both, 2, 32, 1, 16, 16 * tokens, 2}};
    case Kind::kRows:
      return {{0, both, tokens, 0, 2 * dims, dims, 0, 1},
              {dims, both, tokens, 0, 2 * dims, dims, 0, 1}};
    case Kind::kRowsByToken: {
      const std::int64_t step = 2 * dims * heads;
      return {{0, 2 * dims, tokens, 0, step, dims, 0, 1},
              {dims, 2 * dims, tokens, 0, step, dims, 0, 1}};
    }
    case Kind::kApart:
      return {{0, dims, tokens, 0, dims * heads, dims, 0, 1},
              {half * heads, dims, tokens, 0, dims * heads, dims, 0, 1}};
    case Kind::kOdd:
      break;
  }
  return {{half, both, 4, 4 * dims, 8, 8, 32, 1}, {0, both, 4, 4 * dims, 8, 8, 32, 1}};
}

// Numbers of the middle of the range; any bits would be infinite now and then.
inline void fill_numbers(Bytes& memory, ElementType type, std::mt19937_64& random) {
  const std::size_t size = type == ElementType::kFloat32 ? 4 : 2;
  for (std::size_t at = 0; at + size <= memory.size(); at += size) {
    const float value = static_cast<float>(below(random, 2'000'001) - 1'000'000) * 1e-6F;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (size == 4) {
      std::memcpy(memory.data() + at, &bits, 4);
      continue;
    }
    const std::uint16_t half =
        type == ElementType::kBfloat16
            ? static_cast<std::uint16_t>(bits >> 16)
            : static_cast<std::uint16_t>(random() % 0x7800 | (random() % 2 << 15));
    std::memcpy(memory.data() + at, &half, 2);
  }
}

struct Sizes {
  std::int64_t heads;
  std::int64_t tokens;
  std::int64_t dims;
  std::int64_t pairs;
};

// That all kinds of contents have.
inline Sizes some_sizes(std::mt19937_64& random) {
  const std::int64_t heads = 1 + below(random, 3);
  const std::int64_t tokens = 16 << below(random, 4);
  const std::int64_t dims = 16 * (1 + below(random, 6));
  return {heads, tokens, dims, below(random, dims / 2 + 1)};
}

struct World {
  RotationShape rotation;
  std::size_t size;
  std::size_t page_bytes;
  std::size_t slot_bytes;
  std::size_t stride;
  std::vector<std::uint64_t> run_offsets;
  Bytes slots;
  Bytes layers[kLayers];

  World(Kind kind, ElementType type, Pairing pairing, Sizes sizes, std::mt19937_64& random) {
    std::vector<double> theta(static_cast<std::size_t>(sizes.pairs));
    for (std::size_t i = 0; i < theta.size(); ++i) theta[i] = std::pow(0.7, i);
    rotation = {content_of(kind, sizes.heads, sizes.tokens, sizes.dims),
                sizes.heads,
                sizes.dims,
                sizes.tokens,
                type,
                pairing,
                theta};
    size = type == ElementType::kFloat32 ? 4 : 2;
    page_bytes = static_cast<std::size_t>(2 * sizes.heads * sizes.tokens * sizes.dims) * size;
    // Lines, and words of 16 bytes, are at their places, or a few elements beside them.
    const std::size_t step = random() % 2 == 0 ? 6 : 8;
    slot_bytes = kLayers * kPages * page_bytes + step * size;
    const std::size_t num_runs = 1 + random() % 2;  // of a page
    const std::size_t gap = random() % 2 * step * size;
    for (std::size_t run = 0; run < num_runs; ++run) {
      run_offsets.push_back(run * (page_bytes / num_runs + gap) + gap);
    }
    stride = page_bytes + 4 * gap;
    slots.resize(kSlots * slot_bytes);
    fill_numbers(slots, type, random);
    for (auto& layer : layers) {
      layer.resize(kBlocks * stride);
      fill(layer.data(), layer.size(), random);
    }
  }

  [[nodiscard]] PageShape pages() const {
    const auto address = [](const auto& memory) {
      return reinterpret_cast<std::uint64_t>(memory.data());
    };
    return {address(slots), kSlots,
            slot_bytes,     kPages * page_bytes,
            page_bytes,     {address(layers[0]), address(layers[1])},
            kBlocks,        stride,
            run_offsets,    page_bytes / run_offsets.size()};
  }

  [[nodiscard]] const std::byte* source(const MovedTokens& one, std::size_t layer,
                                        const ContentSide& side, std::int64_t i, std::int64_t head,
                                        std::int64_t dim) const {
    const std::int64_t token = one.first_in_chunk + i;
    const auto page = static_cast<std::size_t>(token / rotation.block_tokens);
    const auto offset = element_offset(side, head, token % rotation.block_tokens, dim);
    return slots.data() + static_cast<std::size_t>(one.slot) * slot_bytes +
           (layer * kPages + page) * page_bytes + static_cast<std::size_t>(offset) * size;
  }

  [[nodiscard]] std::size_t target(const MovedTokens& one, const ContentSide& side, std::int64_t i,
                                   std::int64_t head, std::int64_t dim) const {
    const auto at =
        static_cast<std::size_t>(element_offset(side, head, one.first_in_block + i, dim)) * size;
    const std::size_t run_bytes = page_bytes / run_offsets.size();
    return static_cast<std::size_t>(one.block_id) * stride + run_offsets[at / run_bytes] +
           at % run_bytes;
  }
};

inline std::vector<MovedTokens> some_tokens(const World& world, std::mt19937_64& random) {
  std::vector<MovedTokens> moved;
  const std::int64_t tokens = world.rotation.block_tokens;
  for (std::int64_t block = 0; block < kBlocks; ++block) {
    std::int64_t at = random() % 2 == 0 ? 0 : below(random, tokens);
    while (at < tokens) {
      const std::int64_t count = random() % 3 == 0 ? tokens - at : 1 + below(random, tokens - at);
      const std::int64_t shift = random() % 4 == 0 ? 0 : below(random, 4000) - 2000;
      moved.push_back({below(random, kSlots), below(random, kPages * tokens - count + 1), count,
                       block, at, random() % 2 == 0 ? 7 : shift});
      at += count + below(random, 3);
    }
  }
  return moved;
}

}  // namespace moved_world
