// SPDX-License-Identifier: Apache-2.0
// copy_runs and the page copier under the sanitizers: races, bounds, and the right bytes.
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../copy_runs.h"
#include "../omp_team.h"
#include "../page_copier.h"
#include "check.h"

namespace {

using attnstore::copy_runs;
using attnstore::LayerRange;
using attnstore::PageCopier;
using attnstore::PageCopy;
using attnstore::PageShape;
using attnstore::Run;

// A team of three, as an OpenMP runtime has.
void three(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  std::thread threads[] = {std::thread(body, data), std::thread(body, data)};
  body(data);
  for (auto& thread : threads) thread.join();
}

// Several threads copy; the targets are read as soon as copy_runs has returned.
void many_threads_copy() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] {
      std::mt19937_64 random(static_cast<std::uint64_t>(caller));
      for (int round = 0; round < 40; ++round) {
        std::vector<std::size_t> sizes(1 + random() % 9);
        for (auto& size : sizes) size = random() % 5000;
        const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
        std::vector<std::byte> source(total);
        std::vector<std::byte> target(total);
        fill(source.data(), total, random);
        std::vector<Run> runs;
        std::size_t at = 0;
        for (const std::size_t size : sizes) {
          runs.push_back({source.data() + at, target.data() + at, size});
          at += size;
        }
        copy_runs(runs);
        CHECK(source == target);
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
