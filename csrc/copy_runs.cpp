// SPDX-License-Identifier: Apache-2.0
#include "copy_runs.h"

#include <atomic>

#include "omp_team.h"
#include "stream_copy.h"

namespace attnstore {

namespace {

struct Batch {
  const std::vector<Run>& runs;
  std::atomic<std::size_t> next{0};  // the first run that nobody has taken
};

void take_runs(void* data) {
  Batch& batch = *static_cast<Batch*>(data);
  for (std::size_t i = batch.next++; i < batch.runs.size(); i = batch.next++) {
    const Run& run = batch.runs[i];
    stream_copy(run.target, run.source, run.num_bytes);
  }
}

}  // namespace

void copy_runs(const std::vector<Run>& runs) {
  Batch batch{runs};
  on_omp_team(take_runs, &batch);
}

}  // namespace attnstore
