// SPDX-License-Identifier: Apache-2.0
// The rotation kernel's arithmetic on the CPU: every thread of a grid, one after the other, over
// random shapes, against the page rotator, bit by bit. Under the sanitizers a word that is not
// aligned, or outside of its memory, ends it.
#include <stdexcept>
#include <vector>

#include "cuda/rotate_jobs.h"
#include "cuda/rotate_words.h"
#include "tests/moved_world.h"

namespace {

using attnstore::ElementType;
using attnstore::LayerRange;
using attnstore::MovedTokens;
using attnstore::MoveTable;
using attnstore::PageRotator;
using attnstore::PageShape;
using attnstore::Pairing;
using attnstore::RotateJob;
using attnstore::Word16;
using moved_world::below;
using moved_world::Kind;
using moved_world::kKinds;
using moved_world::kLayers;
using moved_world::Sizes;
using moved_world::some_tokens;
using moved_world::World;

// A caller that has any layout, in both of its words.
constexpr Kind kPlainKinds[] = {Kind::kRows, Kind::kRowsByToken, Kind::kApart};

// Sizes that vLLM has, and odd ones.
Sizes plain_sizes(std::mt19937_64& random) {
  const std::int64_t heads = 1 + below(random, 4);
  const std::int64_t tokens = 1 + below(random, 18);
  if (random() % 3 == 0) {
    const std::int64_t dims = 1 + below(random, 21);
    return {heads, tokens, dims, below(random, dims / 2 + 1)};
  }
  constexpr std::int64_t kDims[] = {16, 64, 80, 96, 128};
  const std::int64_t dims = kDims[below(random, 5)];
  constexpr std::int64_t kParts[] = {1, 2, 4};
  return {heads, tokens, dims, random() % 4 == 0 ? 0 : dims / 2 / kParts[below(random, 3)]};
}

// That all kinds of contents have, with a rotation that does not always fill words.
Sizes grouped_sizes(std::mt19937_64& random) {
  Sizes sizes = moved_world::some_sizes(random);
  if (random() % 2 == 0) sizes.pairs = sizes.pairs / 8 * 8;
  return sizes;
}

template <typename Element>
void run_grid(const RotateJob& job, bool is_wide, std::uint32_t num_threads) {
  for (std::uint32_t thread = 0; thread < num_threads; ++thread) {
    if (is_wide) {
      attnstore::rotate_words<Element, Word16>(job, thread, num_threads);
    } else {
      attnstore::rotate_words<Element, typename Element::Bits>(job, thread, num_threads);
    }
  }
}

// Returns whether it was done 16 bytes at a time.
bool rotate_by_words(const World& world, const std::vector<MovedTokens>& moved, LayerRange layers,
                     std::mt19937_64& random) {
  const PageShape pages = world.pages();
  attnstore::check_sizes(pages);
  const bool can_be_wide = attnstore::has_wide_words(pages, world.rotation);
  const bool is_wide = can_be_wide && random() % 4 != 0;
  const MoveTable table = attnstore::make_move_table(world.rotation, moved);
  CHECK(table.words.size() % 2 == 0);
  const auto at = reinterpret_cast<std::uint64_t>(table.words.data());
  CHECK(at % 16 == 0);
  const auto& shape = world.rotation;
  const auto items_max = random() % 2 == 0
                             ? attnstore::kItemsMax
                             : static_cast<std::uint32_t>(shape.num_heads * 2 * shape.head_dim +
                                                          below(random, 20'000));
  const auto num_threads = static_cast<std::uint32_t>(1 + below(random, 70));
  for (const RotateJob& job :
       attnstore::make_rotate_jobs(pages.map(), shape, is_wide, table, at, layers, items_max)) {
    CHECK(job.num_items > 0 && job.num_items <= items_max);
    switch (shape.type) {
      case ElementType::kBfloat16:
        run_grid<attnstore::Bfloat16>(job, is_wide, num_threads);
        break;
      case ElementType::kFloat16:
        run_grid<attnstore::Float16>(job, is_wide, num_threads);
        break;
      case ElementType::kFloat32:
        run_grid<attnstore::Float32>(job, is_wide, num_threads);
    }
  }
  return is_wide;
}

// Returns how often words were 16 bytes.
int tokens_arrive(Kind kind, ElementType type, Pairing pairing, Sizes sizes,
                  std::mt19937_64& random) {
  World world(kind, type, pairing, sizes, random);
  // What nothing of the fast ways on CPUs has a part in.
  const PageRotator rotator(world.pages(), world.rotation, attnstore::rotate_blocks().back());
  int num_wide = 0;
  for (int round = 0; round < 2; ++round) {
    const std::vector<MovedTokens> moved = some_tokens(world, random);
    const auto first = static_cast<std::int64_t>(random() % kLayers);
    const LayerRange layers{first, static_cast<std::int64_t>(kLayers) - below(random, 2)};
    const moved_world::Bytes before[kLayers] = {world.layers[0], world.layers[1]};
    rotator.load(moved, layers);
    const moved_world::Bytes wanted[kLayers] = {world.layers[0], world.layers[1]};
    for (std::size_t i = 0; i < kLayers; ++i) {
      std::memcpy(world.layers[i].data(), before[i].data(), before[i].size());
    }
    num_wide += rotate_by_words(world, moved, layers, random) ? 1 : 0;
    for (std::size_t i = 0; i < kLayers; ++i) CHECK(world.layers[i] == wanted[i]);
  }
  return num_wide;
}

void all_layouts(std::mt19937_64& random) {
  for (const ElementType type :
       {ElementType::kBfloat16, ElementType::kFloat16, ElementType::kFloat32}) {
    for (const Pairing pairing : {Pairing::kNeox, Pairing::kGptj}) {
      int num_wide = 0;
      for (const Kind kind : kKinds) {
        for (int i = 0; i < 4; ++i) {
          num_wide += tokens_arrive(kind, type, pairing, grouped_sizes(random), random);
        }
      }
      for (const Kind kind : kPlainKinds) {
        for (int i = 0; i < 60; ++i) {
          num_wide += tokens_arrive(kind, type, pairing, plain_sizes(random), random);
        }
      }
      CHECK(num_wide >= 20);
    }
  }
}

// Every bit pattern of what does not turn arrives, numbers or not.
void what_does_not_turn_is_copied(std::mt19937_64& random) {
  for (const ElementType type : {ElementType::kBfloat16, ElementType::kFloat32}) {
    for (const std::int64_t pairs : {0, 8, 32}) {
      World world(Kind::kRowsByToken, type, Pairing::kNeox, {2, 16, 64, pairs}, random);
      fill(world.slots.data(), world.slots.size(), random);
      const MovedTokens moved = {1, 5, 16, 3, 0, pairs == 32 ? 0 : 77};
      rotate_by_words(world, {moved}, {0, kLayers}, random);
      const auto& content = world.rotation.content;
      for (std::int64_t token = 0; token < moved.num_tokens; ++token) {
        for (std::int64_t dim = 0; dim < 64; ++dim) {
          for (const auto* side : {&content.key, &content.value}) {
            if (side == &content.key && moved.shift != 0 && dim < 2 * pairs) continue;
            const std::byte* const found =
                world.layers[1].data() + world.target(moved, *side, token, 1, dim);
            CHECK(std::memcmp(found, world.source(moved, 1, *side, token, 1, dim), world.size) ==
                  0);
          }
        }
      }
    }
  }
}

// How the words of a row are put into items: each once, and of 16 bytes none where it may not be.
void words_are_found(std::mt19937_64& random) {
  const auto wide = [&random](Sizes sizes, Pairing pairing, ElementType type) {
    World world(Kind::kRowsByToken, type, pairing, sizes, random);
    PageShape pages = world.pages();
    pages.slots_base = 1 << 20;
    pages.slot_bytes = 1 << 20;
    pages.layer_bases = {1 << 21, 1 << 22};
    pages.block_stride = world.page_bytes;
    pages.run_offsets = {0};
    pages.run_bytes = world.page_bytes;
    const bool found = attnstore::has_wide_words(pages, world.rotation);
    pages.slots_base += 8;
    CHECK(!attnstore::has_wide_words(pages, world.rotation));
    return found;
  };
  const auto bf16 = ElementType::kBfloat16;
  const auto fp32 = ElementType::kFloat32;
  CHECK(wide({8, 16, 128, 64}, Pairing::kNeox, bf16));
  CHECK(wide({8, 16, 128, 64}, Pairing::kGptj, bf16));
  CHECK(wide({3, 16, 80, 16}, Pairing::kNeox, ElementType::kFloat16));
  CHECK(wide({3, 16, 64, 4}, Pairing::kGptj, bf16));
  CHECK(!wide({3, 16, 64, 4}, Pairing::kNeox, bf16));
  CHECK(wide({3, 16, 64, 4}, Pairing::kNeox, fp32));
  CHECK(!wide({3, 16, 64, 7}, Pairing::kGptj, bf16));
  CHECK(!wide({3, 16, 76, 32}, Pairing::kNeox, bf16));
}

void what_is_too_large_is_refused(std::mt19937_64& random) {
  const World world(Kind::kRows, ElementType::kBfloat16, Pairing::kNeox, {2, 16, 64, 32}, random);
  const auto is_refused = [](const PageShape& pages) {
    try {
      attnstore::check_sizes(pages);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  PageShape pages = world.pages();
  CHECK(!is_refused(pages));
  pages.num_blocks = std::int64_t{1} << 32;
  CHECK(is_refused(pages));
  const MoveTable table = attnstore::make_move_table(world.rotation, {{0, 0, 1, 0, 0, 1}});
  bool is_too_large = false;
  try {
    attnstore::make_rotate_jobs(pages.map(), world.rotation, false, table, 0, {0, 1}, 100);
  } catch (const std::invalid_argument&) {
    is_too_large = true;
  }
  CHECK(is_too_large);
}

}  // namespace

int main() {
  attnstore::use_omp_parallel(moved_world::three);
  std::mt19937_64 random(3);
  all_layouts(random);
  what_does_not_turn_is_copied(random);
  words_are_found(random);
  what_is_too_large_is_refused(random);
  std::puts("rotate words: well");
  return 0;
}
