// SPDX-License-Identifier: Apache-2.0
// Where the runs of a copy are, as sums of three numbers, and the jobs that one kernel can do.
// Needs no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/page_runs.h"
#include "cuda/code_words.h"
#include "cuda/copy_words.h"

namespace attnstore {

// From the first run of a page in layer 0 to its runs in other layers, and to its other runs. They
// may be negative, and wrap.
struct CopyOffsets {
  std::vector<Offsets> layers;
  std::vector<Offsets> runs;
};

// Pages as tensors have them, and as slots and rows have them: the same where these are not
// encoded.
struct PageSides {
  PageShape blocks;
  PageShape cells;

  [[nodiscard]] const PageShape& of(Place place) const {
    return place == Place::kBlock ? blocks : cells;
  }
};

CopyOffsets offsets_of(const PageSides& sides, Place source, Place target);

// The addresses of the first run of each page in layer 0.
std::vector<Offsets> first_runs(const PageSides& sides, Place source, Place target,
                                const PageTable& table);

// Such arrays as the kernel reads them.
struct CopyArrays {
  const Offsets* pages;
  const Offsets* layers;
  const Offsets* runs;
};

// The jobs that copy so many pages in these layers, in the order of the layers. Each has at most
// `pieces_max` pieces, which are at least one page's; no layers or no pages make no job.
std::vector<CopyJob> make_jobs(const PageShape& shape, const CopyArrays& arrays,
                               std::uint32_t num_pages, LayerRange layers, std::uint32_t word_bytes,
                               std::uint32_t pieces_max = kPiecesMax);

// The jobs that encode or decode so many pages in these layers. Each has at most `parts_max` parts,
// which are at least one page's. `failed`: of CodeJob.
std::vector<CodeJob> make_code_jobs(const PageSides& sides, const CopyArrays& arrays,
                                    std::uint32_t num_pages, LayerRange layers, bool is_decoding,
                                    std::uint64_t failed, std::uint32_t parts_max = kPartsMax);

}  // namespace attnstore
