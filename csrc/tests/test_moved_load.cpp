// SPDX-License-Identifier: Apache-2.0
// The page rotator under the sanitizers, as each kind of processor that this one can be runs it:
// races, bounds, and the right numbers, in random shapes.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "tests/moved_world.h"

namespace {

using attnstore::ContentSide;
using attnstore::ElementType;
using attnstore::MovedTokens;
using attnstore::PageRotator;
using attnstore::Pairing;
using attnstore::RotateBlock;
using attnstore::RotationShape;
using moved_world::Kind;
using moved_world::kKinds;
using moved_world::kLayers;
using moved_world::kPages;
using moved_world::Sizes;
using moved_world::some_sizes;
using moved_world::some_tokens;
using moved_world::World;

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

// Compares the moved tokens with what they should be; what was not moved is left in `before`.
void compare(const World& world, const std::vector<MovedTokens>& moved, std::size_t layer,
             moved_world::Bytes* before) {
  const RotationShape& shape = world.rotation;
  const moved_world::Bytes& found = world.layers[layer];
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
                 Sizes sizes, std::mt19937_64& random) {
  World world(kind, type, pairing, sizes, random);
  const PageRotator rotator(world.pages(), world.rotation, rotate_block);
  for (int round = 0; round < 2; ++round) {
    const std::vector<MovedTokens> moved = some_tokens(world, random);
    moved_world::Bytes before[kLayers] = {world.layers[0], world.layers[1]};
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

// ThreadSanitizer looks for races, of which one world has as many as the next, and is slow.
#if defined(__SANITIZE_THREAD__)
constexpr int kWorlds = 1;
#else
constexpr int kWorlds = 8;
#endif

int main() {
  attnstore::use_omp_parallel(moved_world::three);
  std::uint64_t seed = 0;
  for (const RotateBlock rotate_block : attnstore::rotate_blocks()) {
    for (const Kind kind : kKinds) {
      for (const ElementType type :
           {ElementType::kBfloat16, ElementType::kFloat16, ElementType::kFloat32}) {
        for (const Pairing pairing : {Pairing::kNeox, Pairing::kGptj}) {
          for (int i = 0; i < kWorlds; ++i) {
            std::mt19937_64 random(++seed);
            const Sizes sizes = some_sizes(random);
            tokens_move(rotate_block, kind, type, pairing, sizes, random);
          }
        }
      }
    }
    // As models are served: these go through the ways that are short and quick.
    for (const Kind kind : {Kind::kVec, Kind::kAmx}) {
      for (const std::int64_t dims : {64, 128}) {
        for (int i = 0; i < kWorlds; ++i) {
          std::mt19937_64 random(++seed);
          tokens_move(rotate_block, kind, ElementType::kBfloat16, Pairing::kNeox,
                      {2, 128, dims, dims / 2}, random);
        }
      }
    }
  }
  std::puts("moved loads: well");
  return 0;
}
