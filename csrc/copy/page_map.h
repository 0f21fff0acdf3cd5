// SPDX-License-Identifier: Apache-2.0
// Where the bytes of a page are. This arithmetic has one source: page_copier.cpp compiles it for
// the CPU, and nvcc compiles it for the device (cuda/copy_words.h).
//
// A page is one block of one layer on one rank. In a KV tensor it is one or several runs of
// contiguous bytes; in a slot and in a row of the write buffer the runs stand one after the other:
//
//   in a KV tensor = layer_bases[layer] + block_id * block_stride + run_offsets[run]
//   in a slot      = slots_base + slot * slot_bytes + layer * layer_bytes
//                  + block_in_chunk * page_bytes + run * run_bytes
//   in a row       = rows_base + (layer * num_rows + row) * page_bytes + run * run_bytes
//
// The write buffer is [layer][row], so that a chunk whose rows follow each other is, in each layer,
// contiguous there as it is in its slot.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ATTNSTORE_HOST_DEVICE __host__ __device__
#else
#define ATTNSTORE_HOST_DEVICE
#endif

namespace attnstore {

enum class Place : std::uint8_t { kSlot, kBlock, kRow };

struct PageCopy {
  std::int64_t slot;
  std::int64_t block_in_chunk;
  std::int64_t block_id;
};

// Addresses and sizes in bytes. The arrays are in the memory of whoever computes addresses, and
// outlive it.
struct PageMap {
  std::uint64_t slots_base;  // of slot 0, this rank's part
  std::uint64_t slot_bytes;
  std::uint64_t layer_bytes;
  std::uint64_t page_bytes;
  const std::uint64_t* layer_bases;
  std::uint64_t block_stride;
  const std::uint64_t* run_offsets;
  std::uint64_t run_bytes;
  std::uint64_t rows_base;
  std::uint64_t num_rows;
};

// The address of one run of a page. `row` counts in rows only. Checks nothing.
ATTNSTORE_HOST_DEVICE inline std::uint64_t run_address(const PageMap& map, Place place,
                                                       const PageCopy& copy, std::int64_t row,
                                                       std::uint64_t layer, std::uint64_t run) {
  switch (place) {
    case Place::kSlot:
      return map.slots_base + static_cast<std::uint64_t>(copy.slot) * map.slot_bytes +
             layer * map.layer_bytes +
             static_cast<std::uint64_t>(copy.block_in_chunk) * map.page_bytes + run * map.run_bytes;
    case Place::kBlock:
      return map.layer_bases[layer] + static_cast<std::uint64_t>(copy.block_id) * map.block_stride +
             map.run_offsets[run];
    case Place::kRow:
      break;
  }
  return map.rows_base + (layer * map.num_rows + static_cast<std::uint64_t>(row)) * map.page_bytes +
         run * map.run_bytes;
}

}  // namespace attnstore
