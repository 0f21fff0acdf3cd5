// SPDX-License-Identifier: Apache-2.0
#include "copy/page_runs.h"

#include <stdexcept>
#include <string>

namespace attnstore {

PageMap PageShape::map() const {
  return {slots_base,         slot_bytes,
          layer_bytes,        page_bytes,
          layer_bases.data(), block_stride,
          run_offsets.data(), run_bytes,
          rows_base,          static_cast<std::uint64_t>(num_rows)};
}

void check_shape(const PageShape& shape) {
  if (shape.page_bytes == 0 || shape.run_bytes * shape.run_offsets.size() != shape.page_bytes) {
    throw std::invalid_argument("the runs of a page do not add up to its bytes");
  }
  if (shape.layer_bytes % shape.page_bytes != 0) {
    throw std::invalid_argument("a layer's part of a slot is not whole pages");
  }
  if (shape.layer_bytes * shape.layer_bases.size() > shape.slot_bytes) {
    throw std::invalid_argument("the layers do not fit into a slot");
  }
  if (shape.num_slots < 0 || shape.num_blocks < 0 || shape.num_rows < 0) {
    throw std::invalid_argument("there is a negative number of slots, blocks or rows");
  }
}

void check_copies(const PageShape& shape, const std::vector<PageCopy>& copies, LayerRange layers) {
  const auto num_layers = static_cast<std::int64_t>(shape.layer_bases.size());
  if (layers.first < 0 || layers.first > layers.stop || layers.stop > num_layers) {
    throw std::out_of_range("layers " + std::to_string(layers.first) + " to " +
                            std::to_string(layers.stop) + " of " + std::to_string(num_layers) +
                            ": one of them does not exist");
  }
  const auto pages = static_cast<std::int64_t>(shape.layer_bytes / shape.page_bytes);
  for (const PageCopy& copy : copies) {
    const bool inside = copy.slot >= 0 && copy.slot < shape.num_slots && copy.block_in_chunk >= 0 &&
                        copy.block_in_chunk < pages && copy.block_id >= 0 &&
                        copy.block_id < shape.num_blocks;
    if (!inside) {
      throw std::out_of_range("slot " + std::to_string(copy.slot) + ", block " +
                              std::to_string(copy.block_in_chunk) + " of the chunk, block id " +
                              std::to_string(copy.block_id) + ": one of them does not exist");
    }
  }
}

void check_rows(const PageShape& shape, const PageTable& table) {
  if (table.rows.size() != table.copies.size()) {
    throw std::out_of_range(std::to_string(table.copies.size()) + " pages, but " +
                            std::to_string(table.rows.size()) + " rows for them");
  }
  for (const std::int64_t row : table.rows) {
    if (row < 0 || row >= shape.num_rows) {
      throw std::out_of_range("row " + std::to_string(row) + " of " +
                              std::to_string(shape.num_rows) + " does not exist");
    }
  }
}

void add_runs(const PageShape& shape, Place source, Place target, const PageTable& table,
              std::size_t layer, std::vector<Run>* runs) {
  const PageMap map = shape.map();
  for (std::size_t i = 0; i < table.copies.size(); ++i) {
    const PageCopy& copy = table.copies[i];
    const std::int64_t row = table.rows.empty() ? 0 : table.rows[i];
    for (std::size_t run = 0; run < shape.run_offsets.size(); ++run) {
      const std::uint64_t from = run_address(map, source, copy, row, layer, run);
      const std::uint64_t to = run_address(map, target, copy, row, layer, run);
      runs->push_back({reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to),
                       map.run_bytes});
    }
  }
}

std::uint32_t word_bytes(const PageShape& shape, Place source, Place target) {
  std::uint64_t bits = shape.run_bytes;  // a bit is set if any of the numbers has it
  for (const Place place : {source, target}) {
    switch (place) {
      case Place::kSlot:
        bits |= shape.slots_base | shape.slot_bytes | shape.layer_bytes | shape.page_bytes;
        break;
      case Place::kBlock:
        bits |= shape.block_stride;
        for (const std::uint64_t base : shape.layer_bases) bits |= base;
        for (const std::uint64_t offset : shape.run_offsets) bits |= offset;
        break;
      case Place::kRow:
        bits |= shape.rows_base | shape.page_bytes;
        break;
    }
  }
  if (bits % 16 == 0) return 16;
  return bits % 4 == 0 ? 4 : 1;
}

void merge_runs(const PageShape& shape, Place source, Place target, std::vector<Run>* runs) {
  if (runs->empty()) return;
  const auto begins_slot = [&](const Run& run) {
    if (source != Place::kSlot && target != Place::kSlot) return false;
    const auto at = source == Place::kSlot ? reinterpret_cast<std::uint64_t>(run.source)
                                           : reinterpret_cast<std::uint64_t>(run.target);
    return (at - shape.slots_base) % shape.slot_bytes == 0;
  };
  std::size_t last = 0;
  for (std::size_t i = 1; i < runs->size(); ++i) {
    Run& before = (*runs)[last];
    const Run& run = (*runs)[i];
    if (run.source == before.source + before.num_bytes &&
        run.target == before.target + before.num_bytes && !begins_slot(run)) {
      before.num_bytes += run.num_bytes;
    } else {
      (*runs)[++last] = run;
    }
  }
  runs->resize(last + 1);
}

}  // namespace attnstore
