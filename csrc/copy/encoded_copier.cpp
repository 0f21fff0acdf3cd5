// SPDX-License-Identifier: Apache-2.0
#include "copy/encoded_copier.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "codec/page_codec.h"
#include "copy/omp_team.h"
#include "copy/stream_copy.h"

namespace attnstore {

namespace {

constexpr std::size_t kTakenBytes = 128 << 10;  // see page_copier.cpp

struct Batch {
  const PageMap map;
  const std::uint64_t cell_bytes;
  const std::uint64_t blocks_per_chunk;
  const bool is_load;
  const std::vector<PageCopy>& copies;
  const std::size_t num_runs;  // of a page
  const std::size_t first_layer;
  const std::size_t num_pages;  // of all layers, one layer after the other
  const std::size_t num_taken;
  std::vector<std::uint8_t> scratch;  // of each thread: a page, then a cell
  const std::size_t num_threads;
  std::vector<std::atomic<bool>> failed;  // by copy
  std::atomic<std::size_t> next{0};       // the first page that no thread has taken
  std::atomic<std::size_t> next_thread{0};

  [[nodiscard]] std::byte* cell(const PageCopy& copy, std::size_t layer) const {
    const std::uint64_t number =
        layer * blocks_per_chunk + static_cast<std::uint64_t>(copy.block_in_chunk);
    return reinterpret_cast<std::byte*>(map.slots_base +
                                        static_cast<std::uint64_t>(copy.slot) * map.slot_bytes +
                                        number * cell_bytes);
  }

  [[nodiscard]] std::byte* run(const PageCopy& copy, std::size_t layer, std::size_t run) const {
    return reinterpret_cast<std::byte*>(run_address(map, Place::kBlock, copy, 0, layer, run));
  }

  bool load(const PageCopy& copy, std::size_t layer, std::uint8_t* page) const {
    const auto* const from = reinterpret_cast<const std::uint8_t*>(cell(copy, layer));
    if (!codec::decode_page(from, cell_bytes, page, map.page_bytes)) return false;
    for (std::size_t i = 0; i < num_runs; ++i) {
      const auto* const at = reinterpret_cast<const std::byte*>(page + i * map.run_bytes);
      stream_copy(run(copy, layer, i), at, map.run_bytes);
    }
    return true;
  }

  bool save(const PageCopy& copy, std::size_t layer, std::uint8_t* page,
            std::uint8_t* encoded) const {
    const auto* raw = reinterpret_cast<const std::uint8_t*>(run(copy, layer, 0));
    if (num_runs > 1) {
      for (std::size_t i = 0; i < num_runs; ++i) {
        std::memcpy(page + i * map.run_bytes, run(copy, layer, i), map.run_bytes);
      }
      raw = page;
    }
    const std::size_t size = codec::encode_page(raw, map.page_bytes, encoded, cell_bytes);
    if (size == 0) return false;
    std::memset(encoded + size, 0, cell_bytes - size);
    stream_copy(cell(copy, layer), reinterpret_cast<const std::byte*>(encoded), cell_bytes);
    return true;
  }

  void move(std::size_t number, std::uint8_t* page) {
    const std::size_t which = number % copies.size();
    const std::size_t layer = first_layer + number / copies.size();
    const bool is_done = is_load ? load(copies[which], layer, page)
                                 : save(copies[which], layer, page, page + map.page_bytes);
    if (!is_done) failed[which].store(true, std::memory_order_relaxed);
  }
};

void take_pages(void* data) {
  Batch& batch = *static_cast<Batch*>(data);
  const std::size_t thread = batch.next_thread.fetch_add(1, std::memory_order_relaxed);
  if (thread >= batch.num_threads) return;  // a team that has grown: the others do it
  std::uint8_t* const page =
      batch.scratch.data() + thread * (batch.scratch.size() / batch.num_threads);
  for (;;) {
    const std::size_t first = batch.next.fetch_add(batch.num_taken, std::memory_order_relaxed);
    if (first >= batch.num_pages) break;
    const std::size_t stop = std::min(first + batch.num_taken, batch.num_pages);
    for (std::size_t number = first; number < stop; ++number) batch.move(number, page);
  }
  end_stream_copies();
}

Batch make_batch(const PageShape& shape, std::uint64_t cell_bytes, bool is_load,
                 const std::vector<PageCopy>& copies, LayerRange layers) {
  const auto first = static_cast<std::size_t>(layers.first);
  const auto stop = static_cast<std::size_t>(layers.stop);
  const auto threads = static_cast<std::size_t>(std::max(1, omp_team_size()));
  return Batch{shape.map(),
               cell_bytes,
               shape.layer_bytes / shape.page_bytes,
               is_load,
               copies,
               shape.run_offsets.size(),
               first,
               (stop - first) * copies.size(),
               std::max<std::size_t>(1, kTakenBytes / shape.page_bytes),
               std::vector<std::uint8_t>(threads * (shape.page_bytes + cell_bytes)),
               threads,
               std::vector<std::atomic<bool>>(copies.size())};
}

/// The slots of copies that have failed, each once.
std::vector<std::int64_t> failed_slots(const Batch& batch) {
  std::vector<std::int64_t> slots;
  for (std::size_t i = 0; i < batch.copies.size(); ++i) {
    if (batch.failed[i]) slots.push_back(batch.copies[i].slot);
  }
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  return slots;
}

}  // namespace

EncodedCopier::EncodedCopier(PageShape pages, std::uint64_t cell_bytes)
    : shape_(std::move(pages)), cell_bytes_(cell_bytes) {
  PageShape whole = shape_;  // slots of pages as the tensors have them
  whole.slot_bytes = whole.layer_bytes * whole.layer_bases.size();
  check_shape(whole);
  if (shape_.page_bytes % 2 != 0) {
    throw std::invalid_argument("a page that is to be encoded has an odd number of bytes");
  }
  const std::uint64_t cells = shape_.layer_bytes / shape_.page_bytes * shape_.layer_bases.size();
  if (cell_bytes_ == 0 || cells * cell_bytes_ > shape_.slot_bytes) {
    throw std::invalid_argument("the cells of the layers do not fit into a slot");
  }
}

void EncodedCopier::load(const std::vector<PageCopy>& copies, LayerRange layers) const {
  check_copies(shape_, copies, layers);
  Batch batch = make_batch(shape_, cell_bytes_, true, copies, layers);
  on_omp_team(take_pages, &batch);
  const std::vector<std::int64_t> slots = failed_slots(batch);
  if (!slots.empty()) {
    throw std::runtime_error("slot " + std::to_string(slots.front()) +
                             " holds no encoded page where one was saved");
  }
}

std::vector<std::int64_t> EncodedCopier::save(const std::vector<PageCopy>& copies,
                                              LayerRange layers) const {
  check_copies(shape_, copies, layers);
  Batch batch = make_batch(shape_, cell_bytes_, false, copies, layers);
  on_omp_team(take_pages, &batch);
  return failed_slots(batch);
}

}  // namespace attnstore
