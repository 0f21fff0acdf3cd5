// SPDX-License-Identifier: Apache-2.0
#include "copy/page_copier.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "copy/omp_team.h"
#include "copy/stream_copy.h"

namespace attnstore {

namespace {

// What a thread takes at a time. To take is a locked instruction: it waits for the streaming stores
// before it, and for the counter, which another processor has. Done for every run of 2 KiB that
// takes longer than the copy (measured: docs/notes/2026-11-copies.md).
constexpr std::size_t kTakenBytes = 128 << 10;

struct Batch {
  const PageMap map;
  const Place source;
  const Place target;
  const std::vector<PageCopy>& copies;
  const std::size_t num_runs;  // of a page
  const std::size_t first_layer;
  const std::size_t num_pages;  // of all layers, one layer after the other
  const std::size_t num_taken;
  std::atomic<std::size_t> next{0};  // the first page that no thread has taken

  // `run` counts from the first page's first one, through all pages.
  [[nodiscard]] std::uint64_t address(Place place, std::size_t run) const {
    const std::size_t page = run / num_runs;
    return run_address(map, place, copies[page % copies.size()], 0,
                       first_layer + page / copies.size(), run % num_runs);
  }

  void copy(std::size_t first, std::size_t stop) const {
    for (std::size_t run = first; run < stop; ++run) {
      // The processor foresees nothing beyond a run: it is told where the next one begins. In the
      // target that is for the address' translation, whose tables are as far away as the memory:
      // a streaming store would wait for it (loads of short runs: 10 to 16 GiB/s on a Zen 4).
      const std::size_t next = std::min(run + 1, stop - 1);
      __builtin_prefetch(reinterpret_cast<const void*>(address(source, next)));
      __builtin_prefetch(reinterpret_cast<const void*>(address(target, next)), 0, 0);
      stream_copy(reinterpret_cast<std::byte*>(address(target, run)),
                  reinterpret_cast<const std::byte*>(address(source, run)), map.run_bytes);
    }
  }
};

void take_pages(void* data) {
  Batch& batch = *static_cast<Batch*>(data);
  for (;;) {
    const std::size_t first = batch.next.fetch_add(batch.num_taken, std::memory_order_relaxed);
    if (first >= batch.num_pages) break;
    const std::size_t stop = std::min(first + batch.num_taken, batch.num_pages);
    batch.copy(first * batch.num_runs, stop * batch.num_runs);
  }
  end_stream_copies();
}

}  // namespace

PageCopier::PageCopier(PageShape shape) : shape_(std::move(shape)) { check_shape(shape_); }

void PageCopier::copy(Place source, Place target, const std::vector<PageCopy>& copies,
                      LayerRange layers) const {
  check_copies(shape_, copies, layers);
  const auto first = static_cast<std::size_t>(layers.first);
  const auto stop = static_cast<std::size_t>(layers.stop);
  const std::size_t num_taken = std::max<std::size_t>(1, kTakenBytes / shape_.page_bytes);
  Batch batch{shape_.map(),
              source,
              target,
              copies,
              shape_.run_offsets.size(),
              first,
              (stop - first) * copies.size(),
              num_taken};
  on_omp_team(take_pages, &batch);
}

void PageCopier::load(const std::vector<PageCopy>& copies, LayerRange layers) const {
  copy(Place::kSlot, Place::kBlock, copies, layers);
}

void PageCopier::save(const std::vector<PageCopy>& copies, LayerRange layers) const {
  copy(Place::kBlock, Place::kSlot, copies, layers);
}

}  // namespace attnstore
