// SPDX-License-Identifier: Apache-2.0
#include "page_copier.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace attnstore {

PageCopier::PageCopier(PageMap map) : map_(std::move(map)) {
  if (map_.run_bytes * map_.run_offsets.size() != map_.page_bytes) {
    throw std::invalid_argument("the runs of a page do not add up to its bytes");
  }
  if (map_.layer_bytes % map_.page_bytes != 0) {
    throw std::invalid_argument("a layer's part of a slot is not whole pages");
  }
  if (map_.layer_bytes * map_.layer_bases.size() > map_.slot_bytes) {
    throw std::invalid_argument("the layers do not fit into a slot");
  }
}

void PageCopier::check(const std::vector<PageCopy>& copies) const {
  const auto pages = static_cast<std::int64_t>(map_.layer_bytes / map_.page_bytes);
  for (const PageCopy& copy : copies) {
    const bool inside = copy.slot >= 0 && copy.slot < map_.num_slots && copy.block_in_chunk >= 0 &&
                        copy.block_in_chunk < pages && copy.block_id >= 0 &&
                        copy.block_id < map_.num_blocks;
    if (!inside) {
      throw std::out_of_range("slot " + std::to_string(copy.slot) + ", block " +
                              std::to_string(copy.block_in_chunk) + " of the chunk, block id " +
                              std::to_string(copy.block_id) + ": one of them does not exist");
    }
  }
}

void PageCopier::add_runs(Direction direction, std::size_t layer,
                          const std::vector<PageCopy>& copies, std::vector<Run>* runs) const {
  for (const PageCopy& copy : copies) {
    const auto slot = static_cast<std::uint64_t>(copy.slot);
    const auto within = static_cast<std::uint64_t>(copy.block_in_chunk);
    const auto block = static_cast<std::uint64_t>(copy.block_id);
    std::uint64_t in_slot = map_.slots_base + slot * map_.slot_bytes + layer * map_.layer_bytes +
                            within * map_.page_bytes;
    const std::uint64_t in_hbm = map_.layer_bases[layer] + block * map_.block_stride;
    for (const std::uint64_t offset : map_.run_offsets) {
      auto* const slot_bytes = reinterpret_cast<std::byte*>(in_slot);
      auto* const hbm_bytes = reinterpret_cast<std::byte*>(in_hbm + offset);
      if (direction == Direction::kLoad) {
        runs->push_back({slot_bytes, hbm_bytes, map_.run_bytes});
      } else {
        runs->push_back({hbm_bytes, slot_bytes, map_.run_bytes});
      }
      in_slot += map_.run_bytes;
    }
  }
}

void PageCopier::copy(Direction direction, const std::vector<PageCopy>& copies) const {
  check(copies);
  std::vector<Run> runs;
  runs.reserve(map_.layer_bases.size() * copies.size() * map_.run_offsets.size());
  for (std::size_t layer = 0; layer < map_.layer_bases.size(); ++layer) {
    add_runs(direction, layer, copies, &runs);
  }
  copy_runs(runs);
}

void PageCopier::load(const std::vector<PageCopy>& copies) const { copy(Direction::kLoad, copies); }

void PageCopier::save(const std::vector<PageCopy>& copies) const { copy(Direction::kSave, copies); }

}  // namespace attnstore
