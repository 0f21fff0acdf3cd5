// SPDX-License-Identifier: Apache-2.0
// Copies between pageable memory, at the speed of all the processors that the model has.
#pragma once

#include <cstddef>
#include <vector>

namespace attnstore {

struct Run {
  const std::byte* source;
  std::byte* target;
  std::size_t num_bytes;
};

// Copies the runs, which do not overlap, on the model's own threads (omp_team.h), and returns when
// that is done.
void copy_runs(const std::vector<Run>& runs);

}  // namespace attnstore
