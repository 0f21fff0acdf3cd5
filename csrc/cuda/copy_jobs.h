// SPDX-License-Identifier: Apache-2.0
// Where the runs of a copy are, as sums of three numbers, and the jobs that one kernel can do.
// Needs no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/page_runs.h"
#include "cuda/copy_words.h"

namespace attnstore {

// From the first run of a page in layer 0 to its runs in other layers, and to its other runs. They
// may be negative, and wrap.
struct CopyOffsets {
  std::vector<Offsets> layers;
  std::vector<Offsets> runs;
};

CopyOffsets offsets_of(const PageShape& shape, Place source, Place target);

// The addresses of the first run of each page in layer 0.
std::vector<Offsets> first_runs(const PageShape& shape, Place source, Place target,
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

}  // namespace attnstore
