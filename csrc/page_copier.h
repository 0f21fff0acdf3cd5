// SPDX-License-Identifier: Apache-2.0
// Copies whole KV pages between a worker's KV tensors and its part of the pool's slots.
//
// A page is one block of one layer; it is one or several runs of contiguous bytes in the KV tensor
// and is contiguous in the slot:
//
//   address in HBM  = layer_bases[layer] + block_id * block_stride + run_offsets[run]
//   address in slot = slots_base + slot * slot_bytes + layer * layer_bytes
//                   + block_in_chunk * page_bytes + run * run_bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy_runs.h"

namespace attnstore {

struct PageMap {
  std::uint64_t slots_base;  // of slot 0, this rank's part
  std::int64_t num_slots;
  std::uint64_t slot_bytes;
  std::uint64_t layer_bytes;
  std::uint64_t page_bytes;
  std::vector<std::uint64_t> layer_bases;
  std::int64_t num_blocks;
  std::uint64_t block_stride;
  std::vector<std::uint64_t> run_offsets;
  std::uint64_t run_bytes;
};

struct PageCopy {
  std::int64_t slot;
  std::int64_t block_in_chunk;
  std::int64_t block_id;
};

class PageCopier {
 public:
  // Throws std::invalid_argument if the map contradicts itself.
  explicit PageCopier(PageMap map);

  // Fills blocks from slots, or slots from blocks, all layers, and returns when that is done.
  // Throws std::out_of_range, before anything is copied, for a slot or block that does not exist.
  void load(const std::vector<PageCopy>& copies) const;
  void save(const std::vector<PageCopy>& copies) const;

 private:
  enum class Direction : std::uint8_t { kLoad, kSave };
  void check(const std::vector<PageCopy>& copies) const;
  void add_runs(Direction direction, std::size_t layer, const std::vector<PageCopy>& copies,
                std::vector<Run>* runs) const;
  void copy(Direction direction, const std::vector<PageCopy>& copies) const;

  const PageMap map_;
};

}  // namespace attnstore
