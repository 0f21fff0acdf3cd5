// SPDX-License-Identifier: Apache-2.0
// The page copier under the sanitizers: races, bounds, and the right bytes.
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "copy/omp_team.h"
#include "copy/page_copier.h"
#include "tests/check.h"

namespace {

using attnstore::LayerRange;
using attnstore::PageCopier;
using attnstore::PageCopy;
using attnstore::PageShape;

// A team of three, as an OpenMP runtime has.
void three(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  std::thread threads[] = {std::thread(body, data), std::thread(body, data)};
  body(data);
  for (auto& thread : threads) thread.join();
}

// Several threads copy, so many pages that a team takes them in several parts, of odd sizes and
// places; the targets are read as soon as a copy is over. What stands beside them stays.
void many_threads_copy() {
  std::vector<std::thread> callers;
  for (std::uint64_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] {
      std::mt19937_64 random(caller);
      for (int round = 0; round < 6; ++round) {
        const std::size_t runs = 1 + random() % 4;
        const std::size_t run_bytes = 1 + random() % 3000;
        const std::size_t page_bytes = runs * run_bytes;
        const std::size_t stride = page_bytes + random() % 70;
        const std::size_t pages = 1 + random() % (600'000 / page_bytes + 1);
        std::vector<std::byte> slots(2 * pages * page_bytes + 64);
        std::vector<std::byte> layers[2] = {std::vector<std::byte>(pages * stride),
                                            std::vector<std::byte>(pages * stride)};
        fill(slots.data(), slots.size(), random);
        const auto address = [](auto& bytes) {
          return reinterpret_cast<std::uint64_t>(bytes.data());
        };
        std::vector<std::uint64_t> offsets;
        for (std::size_t run = 0; run < runs; ++run) offsets.push_back(run * run_bytes);
        const std::size_t from = random() % 64;
        const PageCopier copier(PageShape{address(slots) + from,
                                          1,
                                          2 * pages * page_bytes,
                                          pages * page_bytes,
                                          page_bytes,
                                          {address(layers[0]), address(layers[1])},
                                          static_cast<std::int64_t>(pages),
                                          stride,
                                          offsets,
                                          run_bytes});
        std::vector<PageCopy> copies;
        for (std::size_t page = 0; page < pages; ++page) {
          const auto at = static_cast<std::int64_t>(page);
          copies.push_back({0, at, static_cast<std::int64_t>(pages) - 1 - at});
        }
        copier.load(copies, {0, 2});
        const std::byte* wanted = slots.data() + from;
        for (const auto& layer : layers) {
          for (std::size_t page = pages; page-- > 0; wanted += page_bytes) {
            const std::byte* const block = layer.data() + page * stride;
            CHECK(std::memcmp(block, wanted, page_bytes) == 0);
            for (std::size_t i = page_bytes; i < stride; ++i) CHECK(block[i] == std::byte{0});
          }
        }
        const std::vector<std::byte> before = slots;
        std::memset(slots.data() + from, 0, 2 * pages * page_bytes);
        copier.save(copies, {0, 2});
        CHECK(slots == before);
      }
    });
  }
  for (auto& caller : callers) caller.join();
}

// Blocks go to slots and come back into other blocks.
void pages_come_back() {
  constexpr std::size_t kPageBytes = 320;
  constexpr std::size_t kRunBytes = kPageBytes / 2;
  constexpr std::size_t kPages = 3;
  constexpr std::size_t kBlocks = 8;
  constexpr std::size_t kSlots = 2;
  constexpr std::size_t kStride = kPageBytes + 16;
  std::mt19937_64 random(1);
  std::vector<std::byte> layers[2] = {std::vector<std::byte>(kBlocks * kStride),
                                      std::vector<std::byte>(kBlocks * kStride)};
  for (auto& layer : layers) fill(layer.data(), layer.size(), random);
  const std::vector<std::byte> before[2] = {layers[0], layers[1]};
  const std::size_t slot_bytes = 2 * kPages * kPageBytes;
  std::vector<std::byte> slots(kSlots * slot_bytes);
  const auto address = [](auto& memory) { return reinterpret_cast<std::uint64_t>(memory.data()); };
  const PageCopier copier(PageShape{address(slots),
                                    kSlots,
                                    slot_bytes,
                                    kPages * kPageBytes,
                                    kPageBytes,
                                    {address(layers[0]), address(layers[1])},
                                    kBlocks,
                                    kStride,
                                    {0, kRunBytes + 8},
                                    kRunBytes});
  std::vector<PageCopy> out;
  std::vector<PageCopy> back;
  for (std::int64_t page = 0; page < 3; ++page) {
    out.push_back({1, page, page});
    back.push_back({1, page, 5 + page});
  }
  copier.save(out, {0, 2});
  copier.load(back, {0, 1});
  const std::size_t behind = 5 * kStride;  // nothing of the second layer has moved
  CHECK(std::memcmp(layers[1].data() + behind, before[1].data() + behind, 3 * kStride) == 0);
  copier.load(back, {1, 2});
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t page = 0; page < 3; ++page) {
      for (const std::size_t run : {std::size_t{0}, kRunBytes + 8}) {
        CHECK(std::memcmp(layers[layer].data() + (5 + page) * kStride + run,
                          before[layer].data() + page * kStride + run, kRunBytes) == 0);
      }
    }
  }
  const auto is_refused = [&copier](PageCopy copy, LayerRange range) {
    try {
      copier.save({copy}, range);
    } catch (const std::out_of_range&) {
      return true;
    }
    return false;
  };
  CHECK(is_refused({0, 0, static_cast<std::int64_t>(kBlocks)}, {0, 2}));
  CHECK(is_refused({0, 0, 0}, {0, 3}));
  CHECK(is_refused({0, 0, 0}, {-1, 1}));
  CHECK(is_refused({0, 0, 0}, {2, 1}));
  CHECK(!is_refused({0, 0, 0}, {2, 2}));
}

}  // namespace

int main() {
  // First without an OpenMP runtime, which this program has none of.
  for (const bool has_team : {false, true}) {
    if (has_team) attnstore::use_omp_parallel(three);
    many_threads_copy();
    for (int round = 0; round < 20; ++round) pages_come_back();
  }
  std::puts("copies: well");
  return 0;
}
