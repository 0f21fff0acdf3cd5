// SPDX-License-Identifier: Apache-2.0
// What all copies of pages have in common on the host: the shape that both sides have, the check
// that what a copy names exists, and the runs of bytes that a copy is made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/page_map.h"

namespace attnstore {

// page_map.h says what these are. Without a write buffer num_rows is 0.
struct PageShape {
  std::uint64_t slots_base;
  std::int64_t num_slots;
  std::uint64_t slot_bytes;
  std::uint64_t layer_bytes;
  std::uint64_t page_bytes;
  std::vector<std::uint64_t> layer_bases;
  std::int64_t num_blocks;
  std::uint64_t block_stride;
  std::vector<std::uint64_t> run_offsets;
  std::uint64_t run_bytes;
  std::uint64_t rows_base = 0;
  std::int64_t num_rows = 0;

  // The map for the host; it points into this shape.
  [[nodiscard]] PageMap map() const;
};

struct Run {
  const std::byte* source;
  std::byte* target;
  std::size_t num_bytes;
};

struct LayerRange {
  std::int64_t first;
  std::int64_t stop;
};

// Pages that are copied together. `rows` has as many, or none where no row takes part.
struct PageTable {
  std::vector<PageCopy> copies;
  std::vector<std::int64_t> rows;
};

// Throws std::invalid_argument if the shape contradicts itself.
void check_shape(const PageShape& shape);

// Throws std::out_of_range for a slot, block or layer that does not exist.
void check_copies(const PageShape& shape, const std::vector<PageCopy>& copies, LayerRange layers);

// Throws std::out_of_range for a row that does not exist, or if there are not as many as pages.
void check_rows(const PageShape& shape, const PageTable& table);

// Appends the runs of one layer's pages, in the order of the table. Checks nothing.
void add_runs(const PageShape& shape, Place source, Place target, const PageTable& table,
              std::size_t layer, std::vector<Run>* runs);

// The widest of 16, 4 and 1 bytes that every address and size of such copies is a multiple of.
std::uint32_t word_bytes(const PageShape& shape, Place source, Place target);

// Makes one of neighbours that continue each other on both sides. Layer 0's, and never of two
// slots: the driver may have locked them in two calls, and a copy across two is refused.
void merge_runs(const PageShape& shape, Place source, Place target, std::vector<Run>* runs);

}  // namespace attnstore
