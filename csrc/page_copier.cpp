// SPDX-License-Identifier: Apache-2.0
#include "page_copier.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "omp_team.h"
#include "stream_copy.h"

namespace attnstore {

namespace {

// What a thread takes at a time. To take is a locked instruction: it waits for the streaming stores
// before it, and for the counter, which another processor has. Done for every run of 2 KiB that
// takes longer than the copy (measured: docs/design.md).
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
  std::atomic<std::size_t> next{0};  // the first page that nobody has taken

  void copy(std::size_t page, std::size_t next_page) const {
    const std::size_t layer = first_layer + page / copies.size();
    const std::size_t next_layer = first_layer + next_page / copies.size();
    const PageCopy& places = copies[page % copies.size()];
    const PageCopy& next_places = copies[next_page % copies.size()];
    for (std::size_t run = 0; run < num_runs; ++run) {
      // The processor foresees nothing beyond a run: it is told where the next page's begins.
      const auto ahead = run_address(map, source, next_places, 0, next_layer, run);
      __builtin_prefetch(reinterpret_cast<const void*>(ahead));
      const auto from = run_address(map, source, places, 0, layer, run);
      const auto to = run_address(map, target, places, 0, layer, run);
      stream_copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                  map.run_bytes);
    }
  }
};

void take_pages(void* data) {
  Batch& batch = *static_cast<Batch*>(data);
  for (;;) {
    const std::size_t first = batch.next.fetch_add(batch.num_taken, std::memory_order_relaxed);
    if (first >= batch.num_pages) break;
    const std::size_t stop = std::min(first + batch.num_taken, batch.num_pages);
    for (std::size_t page = first; page < stop; ++page) {
      batch.copy(page, std::min(page + 1, stop - 1));
    }
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
