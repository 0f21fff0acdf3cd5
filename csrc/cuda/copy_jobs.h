// SPDX-License-Identifier: Apache-2.0
// Cuts a copy of pages into jobs that one kernel can do. Needs no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/page_runs.h"
#include "cuda/copy_words.h"

namespace attnstore {

// Pages as the kernel reads them; page_runs.h: PageTable.
struct TableView {
  const PageCopy* copies;
  const std::int64_t* rows;  // null where no row takes part
  std::uint32_t num_copies;
};

// The jobs that copy these pages in these layers, in the order of the layers. Each is at most
// `words_max` words, which are at least one page's; no layers or no pages make no job.
std::vector<CopyJob> make_jobs(const PageMap& map, Place source, Place target,
                               const TableView& table, LayerRange layers, std::uint32_t word_bytes,
                               std::uint32_t words_max = kWordsMax);

}  // namespace attnstore
