// SPDX-License-Identifier: Apache-2.0
#include "cuda/batched_copy.h"

#include <algorithm>

namespace attnstore {

namespace {

// More take longer each: on an H200 0.47 us a run of 64 KiB, and 0.73 to 1.0 in calls of 32,768.
constexpr std::size_t kRunsInACall = 1024;

void copy_one_by_one(const RunLists& runs, std::size_t first, CuStream stream) {
  for (std::size_t i = first; i < runs.sizes.size(); ++i) {
    check_cuda(driver().memcpyAsync(runs.targets[i], runs.sources[i], runs.sizes[i], stream),
               "cuMemcpyAsync");
  }
}

// One call of the driver for runs from `first` on. False if it does not know this call.
bool copy_together(RunLists* runs, std::size_t first, std::size_t count, int source_order,
                   CuStream stream) {
  if (driver().memcpyBatchAsync == nullptr) return false;
  CuCopyAttributes attributes = {};
  attributes.source_order = source_order;
  attributes.flags = kCuOverlapWithCompute;
  std::size_t holds_from = 0;
  std::size_t failed = 0;
  const CuResult result =
      driver().memcpyBatchAsync(&runs->targets[first], &runs->sources[first], &runs->sizes[first],
                                count, &attributes, &holds_from, 1, &failed, stream);
  if (result == kCuNotSupported) return false;
  check_cuda(result, "cuMemcpyBatchAsync");
  return true;
}

}  // namespace

void copy_batch(RunLists* runs, int source_order, CuStream stream) {
  const std::size_t num_runs = runs->sizes.size();
  for (std::size_t first = 0; first < num_runs; first += kRunsInACall) {
    const std::size_t count = std::min(kRunsInACall, num_runs - first);
    if (!copy_together(runs, first, count, source_order, stream)) {
      copy_one_by_one(*runs, first, stream);
      return;
    }
  }
}

}  // namespace attnstore
