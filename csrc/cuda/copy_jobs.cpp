// SPDX-License-Identifier: Apache-2.0
#include "cuda/copy_jobs.h"

#include <algorithm>
#include <stdexcept>

namespace attnstore {

std::vector<CopyJob> make_jobs(const PageMap& map, Place source, Place target,
                               const TableView& table, LayerRange layers, std::uint32_t word_bytes,
                               std::uint32_t words_max) {
  const std::uint64_t words_per_page = map.page_bytes / word_bytes;
  if (words_per_page > words_max) throw std::invalid_argument("a page is too large for one job");
  std::vector<CopyJob> jobs;
  if (table.num_copies == 0) return jobs;
  const auto pages_max = static_cast<std::uint32_t>(words_max / words_per_page);
  const std::uint32_t pages_at_once = std::min(table.num_copies, pages_max);
  // Whole layers go together as long as all their pages fit.
  const std::int64_t layers_at_once = std::max(1U, pages_max / table.num_copies);
  for (std::int64_t layer = layers.first; layer < layers.stop; layer += layers_at_once) {
    const std::int64_t num_layers = std::min(layers_at_once, layers.stop - layer);
    for (std::uint32_t first = 0; first < table.num_copies; first += pages_at_once) {
      const std::uint32_t num_copies = std::min(pages_at_once, table.num_copies - first);
      CopyJob job;
      job.map = map;
      job.source = source;
      job.target = target;
      job.copies = table.copies + first;
      job.rows = table.rows == nullptr ? nullptr : table.rows + first;
      job.num_copies = num_copies;
      job.first_layer = static_cast<std::uint32_t>(layer);
      job.words_per_run = static_cast<std::uint32_t>(map.run_bytes / word_bytes);
      job.words_per_page = static_cast<std::uint32_t>(words_per_page);
      job.num_words = static_cast<std::uint32_t>(num_layers) * num_copies * job.words_per_page;
      jobs.push_back(job);
    }
  }
  return jobs;
}

}  // namespace attnstore
