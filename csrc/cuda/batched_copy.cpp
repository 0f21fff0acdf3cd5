// SPDX-License-Identifier: Apache-2.0
#include "cuda/batched_copy.h"

#include <cstddef>

namespace attnstore {

namespace {

CuAddress as_address(const std::byte* memory) { return reinterpret_cast<CuAddress>(memory); }

void copy_one_by_one(const std::vector<Run>& runs, CuStream stream) {
  for (const Run& run : runs) {
    check_cuda(
        driver().memcpyAsync(as_address(run.target), as_address(run.source), run.num_bytes, stream),
        "cuMemcpyAsync");
  }
}

// One call of the driver for all runs. False if it does not know this call.
bool copy_together(const std::vector<Run>& runs, int source_order, CuStream stream) {
  if (driver().memcpyBatchAsync == nullptr) return false;
  std::vector<CuAddress> sources;
  std::vector<CuAddress> targets;
  std::vector<std::size_t> sizes;
  sources.reserve(runs.size());
  targets.reserve(runs.size());
  sizes.reserve(runs.size());
  for (const Run& run : runs) {
    sources.push_back(as_address(run.source));
    targets.push_back(as_address(run.target));
    sizes.push_back(run.num_bytes);
  }
  CuCopyAttributes attributes = {};
  attributes.source_order = source_order;
  attributes.flags = kCuOverlapWithCompute;
  std::size_t holds_from = 0;
  std::size_t failed = 0;
  const CuResult result =
      driver().memcpyBatchAsync(targets.data(), sources.data(), sizes.data(), runs.size(),
                                &attributes, &holds_from, 1, &failed, stream);
  if (result == kCuNotSupported) return false;
  check_cuda(result, "cuMemcpyBatchAsync");
  return true;
}

}  // namespace

void copy_batch(const std::vector<Run>& runs, int source_order, CuStream stream) {
  if (runs.empty() || copy_together(runs, source_order, stream)) return;
  copy_one_by_one(runs, stream);
}

}  // namespace attnstore
