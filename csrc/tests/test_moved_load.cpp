// SPDX-License-Identifier: Apache-2.0
// The page rotator under the sanitizers, as each kind of processor that this one can be runs it:
// races, bounds, and the right numbers, in random shapes.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../omp_team.h"
#include "../page_rotator.h"
#include "check.h"

namespace {

using attnstore::ContentSide;
using attnstore::element_offset;
using attnstore::ElementType;
using attnstore::MovedTokens;
using attnstore::PageRotator;
using attnstore::PageShape;
using attnstore::Pairing;
using attnstore::RotateBlock;
using attnstore::RotationShape;

constexpr std::size_t kLayers = 2;
constexpr std::int64_t kSlots = 3;
constexpr std::int64_t kPages = 2;
constexpr std::int64_t kBlocks = 5;

// A team of three, as an OpenMP runtime has.
void three(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  std::thread threads[] = {std::thread(body, data), std::thread(body, data)};
  body(data);
  for (auto& thread : threads) thread.join();
}

std::int64_t below(std::mt19937_64& random, std::int64_t stop) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(stop));
}

enum class Kind { kVec, kAmx, kRows, kRowsByToken, kApart, kOdd };
constexpr Kind kKinds[] = {Kind::kVec,         Kind::kAmx,   Kind::kRows,
                           Kind::kRowsByToken, Kind::kApart, Kind::kOdd};

attnstore::ContentMap content_of(Kind kind, std::int64_t heads, std::int64_t tokens,
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

// An element as a number, by its bits; said here once more, in other words than rotation.h's.
double number_of(ElementType type, const std::byte* at) {
  if (type == ElementType::kFloat32) {
    float value = 0;
    std::memcpy(&value, at, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, 2);
  const int mantissa_bits = type == ElementType::kBfloat16 ? 7 : 10;
  const int bias = type == ElementType::kBfloat16 ? 127 : 15;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  const double size = std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
  return (bits & 0x8000) != 0 ? -size : size;
}

// Half a unit in the last place, and what float32 rounds before.
double rounding(ElementType type, double value, double norm) {
  const int mantissa_bits = type == ElementType::kBfloat16  ? 7
                            : type == ElementType::kFloat16 ? 10
                                                            : 23;
  const int lowest = type == ElementType::kFloat16 ? -14 : -126;
  const int exponent = std::max(value == 0 ? lowest : std::ilogb(value), lowest);
  return std::ldexp(0.5 + 1e-6, exponent - mantissa_bits) + 3 * std::ldexp(norm, -24);
}

// Numbers of the middle of the range: any bits would be infinite now and then, and so would pairs
// of the largest when they are turned.
void fill_numbers(std::vector<std::byte>& memory, ElementType type, std::mt19937_64& random) {
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

struct World {
  RotationShape rotation;
  std::size_t size;
  std::size_t page_bytes;
  std::size_t slot_bytes;
  std::size_t stride;
  std::vector<std::uint64_t> run_offsets;
  std::vector<std::byte> slots;
  std::vector<std::byte> layers[kLayers];

  World(Kind kind, ElementType type, Pairing pairing, std::mt19937_64& random) {
    const std::int64_t heads = 1 + below(random, 3);
    const std::int64_t tokens = 16 << below(random, 3);
    const std::int64_t dims = 16 * (1 + below(random, 6));
    std::vector<double> theta(static_cast<std::size_t>(below(random, dims / 2 + 1)));
    for (std::size_t i = 0; i < theta.size(); ++i) theta[i] = std::pow(0.7, i);
    rotation = {content_of(kind, heads, tokens, dims), heads, dims, tokens, type, pairing, theta};
    size = type == ElementType::kFloat32 ? 4 : 2;
    page_bytes = static_cast<std::size_t>(2 * heads * tokens * dims) * size;
    slot_bytes = kLayers * kPages * page_bytes + 6 * size;
    // One run a page or two; a line is at its place, or a few elements beside it.
    const std::size_t num_runs = 1 + random() % 2;
    const std::size_t gap = random() % 2 * 6 * size;
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

std::vector<MovedTokens> some_tokens(const World& world, std::mt19937_64& random) {
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

// Compares the moved tokens with what they should be; what was not moved is left in `before`.
void compare(const World& world, const std::vector<MovedTokens>& moved, std::size_t layer,
             std::vector<std::byte>* before) {
  const RotationShape& shape = world.rotation;
  const std::vector<std::byte>& found = world.layers[layer];
  const auto pairs = static_cast<std::int64_t>(shape.theta.size());
  for (const MovedTokens& one : moved) {
    for (std::int64_t i = 0; i < one.num_tokens; ++i) {
      for (std::int64_t head = 0; head < shape.num_heads; ++head) {
        for (const ContentSide* side : {&shape.content.key, &shape.content.value}) {
          for (std::int64_t dim = 0; dim < shape.head_dim; ++dim) {
            const std::size_t to = world.target(one, *side, i, head, dim);
            const std::byte* const from = world.source(one, layer, *side, i, head, dim);
            const bool turns = side == &shape.content.key && dim < 2 * pairs && one.shift != 0;
            if (!turns) CHECK(std::memcmp(found.data() + to, from, world.size) == 0);
            std::memcpy(before->data() + to, found.data() + to, world.size);
          }
        }
        for (std::int64_t pair = 0; one.shift != 0 && pair < pairs; ++pair) {
          const auto dims = attnstore::pair_dims(shape.pairing, pairs, pair);
          const ContentSide& side = shape.content.key;
          const double x1 =
              number_of(shape.type, world.source(one, layer, side, i, head, dims.first));
          const double x2 =
              number_of(shape.type, world.source(one, layer, side, i, head, dims.second));
          const double angle =
              static_cast<double>(one.shift) * shape.theta[static_cast<std::size_t>(pair)];
          const double norm = std::hypot(x1, x2);
          const double y1 = x1 * std::cos(angle) - x2 * std::sin(angle);
          const double y2 = x2 * std::cos(angle) + x1 * std::sin(angle);
          const double found1 =
              number_of(shape.type, found.data() + world.target(one, side, i, head, dims.first));
          const double found2 =
              number_of(shape.type, found.data() + world.target(one, side, i, head, dims.second));
          CHECK(std::abs(found1 - y1) <= rounding(shape.type, y1, norm));
          CHECK(std::abs(found2 - y2) <= rounding(shape.type, y2, norm));
        }
      }
    }
  }
}

void tokens_move(RotateBlock rotate_block, Kind kind, ElementType type, Pairing pairing,
                 std::uint64_t seed) {
  std::mt19937_64 random(seed);
  World world(kind, type, pairing, random);
  const PageRotator rotator(world.pages(), world.rotation, rotate_block);
  for (int round = 0; round < 2; ++round) {
    const std::vector<MovedTokens> moved = some_tokens(world, random);
    std::vector<std::byte> before[kLayers] = {world.layers[0], world.layers[1]};
    rotator.load(moved, {0, kLayers});
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      compare(world, moved, layer, &before[layer]);
      CHECK(before[layer] == world.layers[layer]);  // nothing else was touched
    }
  }
  MovedTokens wrong = {0, kPages * world.rotation.block_tokens, 1, 0, 0, 1};
  bool is_refused = false;
  try {
    rotator.load({wrong}, {0, kLayers});
  } catch (const std::out_of_range&) {
    is_refused = true;
  }
  CHECK(is_refused);
}

}  // namespace

int main() {
  attnstore::use_omp_parallel(three);
  std::uint64_t seed = 0;
  for (const RotateBlock rotate_block : attnstore::rotate_blocks()) {
    for (const Kind kind : kKinds) {
      for (const ElementType type :
           {ElementType::kBfloat16, ElementType::kFloat16, ElementType::kFloat32}) {
        for (const Pairing pairing : {Pairing::kNeox, Pairing::kGptj}) {
          for (int i = 0; i < 3; ++i) tokens_move(rotate_block, kind, type, pairing, ++seed);
        }
      }
    }
  }
  std::puts("moved loads: well");
  return 0;
}
