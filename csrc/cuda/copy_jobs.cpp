// SPDX-License-Identifier: Apache-2.0
#include "cuda/copy_jobs.h"

#include <algorithm>
#include <stdexcept>

namespace attnstore {

namespace {

std::uint32_t piece_words(std::uint32_t word_bytes) {
  if (word_bytes == sizeof(Word16)) return kPieceWords<Word16>;
  return word_bytes == sizeof(Word4) ? kPieceWords<Word4> : kPieceWords<Word1>;
}

// Of a page that is the first one at each place.
Offsets run_of(const PageSides& sides, Place source, Place target, std::uint64_t layer,
               std::uint64_t run) {
  const PageCopy first = {};
  return {run_address(sides.of(source).map(), source, first, 0, layer, run),
          run_address(sides.of(target).map(), target, first, 0, layer, run)};
}

// Calls make(first layer, how many, first page, how many) for each job.
template <typename Make>
void each_job(std::uint64_t pages_max, std::uint32_t num_pages, LayerRange layers,
              const Make& make) {
  const auto pages_at_once =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(num_pages, pages_max));
  // Whole layers go together as long as all their pages fit.
  const auto layers_at_once =
      static_cast<std::int64_t>(std::max<std::uint64_t>(1, pages_max / num_pages));
  for (std::int64_t layer = layers.first; layer < layers.stop; layer += layers_at_once) {
    const std::int64_t num_layers = std::min(layers_at_once, layers.stop - layer);
    for (std::uint32_t first = 0; first < num_pages; first += pages_at_once) {
      make(layer, static_cast<std::uint32_t>(num_layers), first,
           std::min(pages_at_once, num_pages - first));
    }
  }
}

Offsets operator-(const Offsets& a, const Offsets& b) {
  return {a.source - b.source, a.target - b.target};
}

}  // namespace

CopyOffsets offsets_of(const PageSides& sides, Place source, Place target) {
  CopyOffsets found;
  if (sides.blocks.layer_bases.empty()) return found;
  const Offsets first = run_of(sides, source, target, 0, 0);
  for (std::uint64_t layer = 0; layer < sides.blocks.layer_bases.size(); ++layer) {
    found.layers.push_back(run_of(sides, source, target, layer, 0) - first);
  }
  for (std::uint64_t run = 0; run < sides.blocks.run_offsets.size(); ++run) {
    found.runs.push_back(run_of(sides, source, target, 0, run) - first);
  }
  return found;
}

std::vector<Offsets> first_runs(const PageSides& sides, Place source, Place target,
                                const PageTable& table) {
  const PageMap from = sides.of(source).map();
  const PageMap to = sides.of(target).map();
  std::vector<Offsets> found;
  found.reserve(table.copies.size());
  for (std::size_t i = 0; i < table.copies.size(); ++i) {
    const std::int64_t row = table.rows.empty() ? 0 : table.rows[i];
    found.push_back({run_address(from, source, table.copies[i], row, 0, 0),
                     run_address(to, target, table.copies[i], row, 0, 0)});
  }
  return found;
}

std::vector<CopyJob> make_jobs(const PageShape& shape, const CopyArrays& arrays,
                               std::uint32_t num_pages, LayerRange layers, std::uint32_t word_bytes,
                               std::uint32_t pieces_max) {
  const std::uint64_t words_per_run = shape.run_bytes / word_bytes;
  const std::uint64_t pieces_per_run = (words_per_run - 1) / piece_words(word_bytes) + 1;
  const std::uint64_t pieces_per_page = pieces_per_run * shape.run_offsets.size();
  if (pieces_per_page > pieces_max) throw std::invalid_argument("a page is too large for one job");
  std::vector<CopyJob> jobs;
  if (num_pages == 0) return jobs;
  each_job(
      pieces_max / pieces_per_page, num_pages, layers,
      [&](std::int64_t layer, std::uint32_t num_layers, std::uint32_t first, std::uint32_t count) {
        CopyJob job;
        job.pages = arrays.pages + first;
        job.layers = arrays.layers + layer;
        job.runs = arrays.runs;
        job.num_pages = divide_by(count);
        job.pieces_per_page = divide_by(static_cast<std::uint32_t>(pieces_per_page));
        job.pieces_per_run = divide_by(static_cast<std::uint32_t>(pieces_per_run));
        job.words_per_run = static_cast<std::uint32_t>(words_per_run);
        job.num_pieces = num_layers * count * job.pieces_per_page.divisor;
        jobs.push_back(job);
      });
  return jobs;
}

std::vector<CodeJob> make_code_jobs(const PageSides& sides, const CopyArrays& arrays,
                                    std::uint32_t num_pages, LayerRange layers, bool is_decoding,
                                    std::uint64_t failed, std::uint32_t parts_max) {
  const CodeParts parts = code_parts(sides.blocks.page_bytes);
  const std::uint32_t per_page =
      is_decoding ? (parts.groups + kGroupsOfPart - 1) / kGroupsOfPart : 1;
  if (per_page > parts_max) throw std::invalid_argument("a page is too large for one job");
  std::vector<CodeJob> jobs;
  if (num_pages == 0) return jobs;
  each_job(
      parts_max / per_page, num_pages, layers,
      [&](std::int64_t layer, std::uint32_t num_layers, std::uint32_t first, std::uint32_t count) {
        CodeJob job;
        job.pages = arrays.pages + first;
        job.layers = arrays.layers + layer;
        job.runs = arrays.runs;
        job.num_pages = divide_by(count);
        job.parts_per_page = divide_by(per_page);
        job.run_bytes = divide_by(static_cast<std::uint32_t>(sides.blocks.run_bytes));
        job.parts = parts;
        job.cell_bytes = static_cast<std::uint32_t>(sides.cells.page_bytes);
        job.num_parts = num_layers * count * per_page;
        job.failed = failed;
        jobs.push_back(job);
      });
  return jobs;
}

}  // namespace attnstore
