// SPDX-License-Identifier: Apache-2.0
// The copy kernel's arithmetic on the CPU: every thread of a grid, one after the other, over random
// shapes, against copies byte by byte. Under the sanitizers a word that is not aligned, or outside
// of its memory, ends it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy/page_runs.h"
#include "cuda/copy_jobs.h"
#include "cuda/copy_words.h"
#include "tests/check.h"

namespace {

using attnstore::CopyJob;
using attnstore::LayerRange;
using attnstore::PageCopy;
using attnstore::PageShape;
using attnstore::PageTable;
using attnstore::Place;
using attnstore::Run;

struct Route {
  Place source;
  Place target;
};
constexpr Route kRoutes[] = {{Place::kSlot, Place::kBlock},
                             {Place::kBlock, Place::kSlot},
                             {Place::kBlock, Place::kRow},
                             {Place::kRow, Place::kSlot}};

std::size_t up_to(std::size_t most, std::mt19937_64& random) { return 1 + random() % most; }

std::uint64_t address(const std::byte* memory) { return reinterpret_cast<std::uint64_t>(memory); }

// One allocation a memory, so that a sanitizer sees what is beyond it. `skew` unaligns it.
struct Memory {
  Memory(std::size_t num_bytes, std::size_t skew, std::mt19937_64& random)
      : size(num_bytes), all(new std::byte[num_bytes + skew]), bytes(all.get() + skew) {
    fill(bytes, num_bytes, random);
  }
  [[nodiscard]] std::vector<std::byte> copy() const { return {bytes, bytes + size}; }

  std::size_t size;
  std::unique_ptr<std::byte[]> all;
  std::byte* bytes;
};

struct World {
  PageShape shape;
  std::size_t pages_per_chunk = 0;
  std::unique_ptr<Memory> slots;
  std::unique_ptr<Memory> rows;
  std::vector<Memory> layers;

  explicit World(std::mt19937_64& random) {
    const std::size_t unit = std::size_t{1} << (random() % 6);  // 1 to 32 bytes
    const std::size_t skew = random() % 3 == 0 ? unit % 16 : 0;
    const std::size_t num_layers = up_to(4, random);
    shape.run_bytes = unit * up_to(9, random);
    std::uint64_t end = 0;
    for (std::size_t i = up_to(4, random); i > 0; --i) {
      const std::uint64_t gap = unit * (random() % 3);
      shape.run_offsets.push_back(end + gap);
      end += gap + shape.run_bytes;
    }
    shape.page_bytes = shape.run_bytes * shape.run_offsets.size();
    shape.block_stride = end + unit * (random() % 3);
    pages_per_chunk = up_to(4, random);
    shape.layer_bytes = pages_per_chunk * shape.page_bytes;
    shape.slot_bytes = num_layers * shape.layer_bytes + unit * (random() % 3);
    shape.num_slots = static_cast<std::int64_t>(up_to(4, random));
    shape.num_blocks = static_cast<std::int64_t>(up_to(12, random));
    shape.num_rows = static_cast<std::int64_t>(up_to(12, random));
    const auto times = [](std::int64_t count, std::uint64_t num_bytes) {
      return static_cast<std::size_t>(count) * num_bytes;
    };
    slots = std::make_unique<Memory>(times(shape.num_slots, shape.slot_bytes), skew, random);
    rows = std::make_unique<Memory>(times(shape.num_rows, num_layers * shape.page_bytes), skew,
                                    random);
    for (std::size_t i = 0; i < num_layers; ++i) {
      layers.emplace_back(times(shape.num_blocks, shape.block_stride), skew, random);
      shape.layer_bases.push_back(address(layers.back().bytes));
    }
    shape.slots_base = address(slots->bytes);
    shape.rows_base = address(rows->bytes);
    attnstore::check_shape(shape);
  }

  // Distinct slots' blocks, blocks and rows, so that no order of copies matters.
  [[nodiscard]] PageTable table(std::mt19937_64& random) const {
    std::vector<std::int64_t> places[3];
    const std::int64_t counts[] = {shape.num_slots * static_cast<std::int64_t>(pages_per_chunk),
                                   shape.num_blocks, shape.num_rows};
    for (int i = 0; i < 3; ++i) {
      for (std::int64_t at = 0; at < counts[i]; ++at) places[i].push_back(at);
      if (random() % 2 != 0) std::shuffle(places[i].begin(), places[i].end(), random);
    }
    const auto most = static_cast<std::size_t>(*std::min_element(counts, counts + 3));
    PageTable table;
    for (std::size_t i = up_to(most, random); i > 0; --i) {
      const auto per_chunk = static_cast<std::int64_t>(pages_per_chunk);
      const std::int64_t in_slots = places[0][i - 1];
      table.copies.push_back({in_slots / per_chunk, in_slots % per_chunk, places[1][i - 1]});
      table.rows.push_back(places[2][i - 1]);
    }
    return table;
  }

  // Byte `byte` of a page, by arithmetic of this test's own.
  [[nodiscard]] std::byte* at(Place place, const PageTable& table, std::size_t i, std::size_t layer,
                              std::size_t byte) const {
    const PageCopy& copy = table.copies[i];
    if (place == Place::kBlock) {
      const std::size_t in_block =
          shape.run_offsets[byte / shape.run_bytes] + byte % shape.run_bytes;
      return layers[layer].bytes + static_cast<std::size_t>(copy.block_id) * shape.block_stride +
             in_block;
    }
    if (place == Place::kSlot) {
      const std::size_t page =
          layer * pages_per_chunk + static_cast<std::size_t>(copy.block_in_chunk);
      return slots->bytes + static_cast<std::size_t>(copy.slot) * shape.slot_bytes +
             page * shape.page_bytes + byte;
    }
    const std::size_t page =
        layer * static_cast<std::size_t>(shape.num_rows) + static_cast<std::size_t>(table.rows[i]);
    return rows->bytes + page * shape.page_bytes + byte;
  }

  // All memory, as it should be after the copy.
  [[nodiscard]] std::vector<std::vector<std::byte>> all() const {
    std::vector<std::vector<std::byte>> found = {slots->copy(), rows->copy()};
    for (const Memory& layer : layers) found.push_back(layer.copy());
    return found;
  }
};

template <typename Word>
void run_grid(const CopyJob& job, std::uint32_t num_threads) {
  for (std::uint32_t thread = 0; thread < num_threads; ++thread) {
    attnstore::copy_words<Word>(job, thread, num_threads);
  }
}

void copy_by_words(const World& world, Route route, const PageTable& table, LayerRange layers,
                   std::mt19937_64& random) {
  const PageShape& shape = world.shape;
  std::uint32_t width = attnstore::word_bytes(shape, route.source, route.target);
  if (random() % 4 == 0) width = 1;
  const std::vector<attnstore::Offsets> pages =
      attnstore::first_runs({shape, shape}, route.source, route.target, table);
  const attnstore::CopyOffsets offsets =
      attnstore::offsets_of({shape, shape}, route.source, route.target);
  const attnstore::CopyArrays arrays{pages.data(), offsets.layers.data(), offsets.runs.data()};
  const auto per_page = static_cast<std::uint32_t>(shape.page_bytes);  // more than its pieces
  const std::uint32_t pieces_max = random() % 2 == 0
                                       ? attnstore::kPiecesMax
                                       : per_page + static_cast<std::uint32_t>(random() % 4000);
  const auto num_threads = attnstore::kLanesMax * static_cast<std::uint32_t>(up_to(5, random));
  const auto num_pages = static_cast<std::uint32_t>(pages.size());
  for (const CopyJob& job :
       attnstore::make_jobs(shape, arrays, num_pages, layers, width, pieces_max)) {
    CHECK(job.num_pieces > 0 && job.num_pieces <= pieces_max);
    if (width == 16) run_grid<attnstore::Word16>(job, num_threads);
    if (width == 4) run_grid<attnstore::Word4>(job, num_threads);
    if (width == 1) run_grid<attnstore::Word1>(job, num_threads);
  }
}

void copy_by_runs(const World& world, Route route, const PageTable& table, LayerRange layers) {
  std::vector<Run> runs;
  for (std::int64_t layer = layers.first; layer < layers.stop; ++layer) {
    attnstore::add_runs(world.shape, route.source, route.target, table,
                        static_cast<std::size_t>(layer), &runs);
  }
  const std::size_t before = runs.size();
  attnstore::merge_runs(world.shape, route.source, route.target, &runs);
  CHECK(runs.size() <= before);
  for (const Run& run : runs) std::memcpy(run.target, run.source, run.num_bytes);
}

void every_byte_arrives(std::mt19937_64& random) {
  const World world(random);
  const PageShape& shape = world.shape;
  const auto num_layers = static_cast<std::int64_t>(shape.layer_bases.size());
  for (const Route route : kRoutes) {
    const PageTable table = world.table(random);
    const auto first = static_cast<std::int64_t>(random() % shape.layer_bases.size());
    const LayerRange layers{first, num_layers - static_cast<std::int64_t>(random() % 2)};
    attnstore::check_copies(shape, table.copies, {0, num_layers});
    attnstore::check_rows(shape, table);
    const bool has_words = random() % 3 != 0;
    const auto before = world.all();
    // What should be there, written byte by byte; then the memory is as before, and copied to.
    for (std::int64_t layer = layers.first; layer < layers.stop; ++layer) {
      for (std::size_t i = 0; i < table.copies.size(); ++i) {
        for (std::size_t byte = 0; byte < shape.page_bytes; ++byte) {
          *world.at(route.target, table, i, static_cast<std::size_t>(layer), byte) =
              *world.at(route.source, table, i, static_cast<std::size_t>(layer), byte);
        }
      }
    }
    const auto wanted = world.all();
    std::memcpy(world.slots->bytes, before[0].data(), before[0].size());
    std::memcpy(world.rows->bytes, before[1].data(), before[1].size());
    for (std::size_t i = 0; i < world.layers.size(); ++i) {
      std::memcpy(world.layers[i].bytes, before[2 + i].data(), before[2 + i].size());
    }
    if (has_words) {
      copy_by_words(world, route, table, layers, random);
    } else {
      copy_by_runs(world, route, table, layers);
    }
    CHECK(world.all() == wanted);
  }
}

// A chunk whose rows follow each other leaves in one run a layer.
void neighbours_are_one_run() {
  std::mt19937_64 random(5);
  World world(random);
  PageTable table;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(world.pages_per_chunk); ++i) {
    table.copies.push_back({0, i, 0});
    table.rows.push_back(i);
  }
  CHECK(table.copies.size() > 1);
  std::vector<Run> runs;
  attnstore::add_runs(world.shape, Place::kRow, Place::kSlot, table, 0, &runs);
  attnstore::merge_runs(world.shape, Place::kRow, Place::kSlot, &runs);
  CHECK(runs.size() == 1);
  CHECK(runs[0].num_bytes == world.shape.layer_bytes);
  std::vector<Run> none;
  attnstore::merge_runs(world.shape, Place::kRow, Place::kSlot, &none);
  CHECK(none.empty());
}

// Two slots that follow each other, of a model whose chunk is one run.
void no_run_is_of_two_slots() {
  std::vector<std::byte> memory(64);
  PageShape shape{};
  shape.slots_base = reinterpret_cast<std::uint64_t>(memory.data());
  shape.slot_bytes = 16;
  std::vector<std::byte> blocks(32);
  const std::vector<Run> both{{memory.data(), blocks.data(), 8},
                              {memory.data() + 8, blocks.data() + 8, 8},
                              {memory.data() + 16, blocks.data() + 16, 16}};
  std::vector<Run> loads = both;
  attnstore::merge_runs(shape, Place::kSlot, Place::kBlock, &loads);
  CHECK(loads.size() == 2 && loads[0].num_bytes == 16 && loads[1].num_bytes == 16);
  std::vector<Run> saves;
  for (const Run& run : both) {
    saves.push_back({run.target, const_cast<std::byte*>(run.source), run.num_bytes});
  }
  attnstore::merge_runs(shape, Place::kRow, Place::kSlot, &saves);
  CHECK(saves.size() == 2);
  std::vector<Run> within_hbm = both;
  attnstore::merge_runs(shape, Place::kBlock, Place::kRow, &within_hbm);
  CHECK(within_hbm.size() == 1);
}

void quotients_are_exact() {
  std::mt19937_64 random(9);
  const std::uint32_t most = (1U << 31) - 1;
  for (int round = 0; round < 200'000; ++round) {
    const auto by = static_cast<std::uint32_t>(1 + (random() % most >> random() % 31));
    const auto divisor = attnstore::divide_by(by);
    const auto number = static_cast<std::uint32_t>(random() % most >> random() % 31);
    const std::uint32_t multiple = most / by * by;
    for (const std::uint32_t one : {number, multiple, multiple - 1, most}) {
      CHECK(attnstore::quotient(one, divisor) == one / by);
    }
  }
}

void what_does_not_exist_is_refused() {
  std::mt19937_64 random(1);
  const World world(random);
  const auto is_refused = [&world](std::vector<std::int64_t> rows) {
    const PageTable table{{{0, 0, 0}}, std::move(rows)};
    try {
      attnstore::check_rows(world.shape, table);
    } catch (const std::out_of_range&) {
      return true;
    }
    return false;
  };
  CHECK(!is_refused({0}));
  CHECK(!is_refused({world.shape.num_rows - 1}));
  CHECK(is_refused({world.shape.num_rows}));
  CHECK(is_refused({-1}));
  CHECK(is_refused({}));
  CHECK(is_refused({0, 0}));
}

}  // namespace

int main() {
  std::mt19937_64 random(2);
  for (int round = 0; round < 1500; ++round) every_byte_arrives(random);
  quotients_are_exact();
  neighbours_are_one_run();
  no_run_is_of_two_slots();
  what_does_not_exist_is_refused();
  std::puts("page words: well");
  return 0;
}
