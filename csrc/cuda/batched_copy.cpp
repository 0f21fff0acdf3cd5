// SPDX-License-Identifier: Apache-2.0
#include "cuda/batched_copy.h"

namespace attnstore {

namespace {

void copy_one_by_one(const RunLists& runs, CuStream stream) {
  for (std::size_t i = 0; i < runs.sizes.size(); ++i) {
    check_cuda(driver().memcpyAsync(runs.targets[i], runs.sources[i], runs.sizes[i], stream),
               "cuMemcpyAsync");
  }
}

// One call of the driver for all runs. False if it does not know this call.
bool copy_together(RunLists* runs, int source_order, CuStream stream) {
  if (driver().memcpyBatchAsync == nullptr) return false;
  CuCopyAttributes attributes = {};
  attributes.source_order = source_order;
  attributes.flags = kCuOverlapWithCompute;
  std::size_t holds_from = 0;
  std::size_t failed = 0;
  const CuResult result =
      driver().memcpyBatchAsync(runs->targets.data(), runs->sources.data(), runs->sizes.data(),
                                runs->sizes.size(), &attributes, &holds_from, 1, &failed, stream);
  if (result == kCuNotSupported) return false;
  check_cuda(result, "cuMemcpyBatchAsync");
  return true;
}

}  // namespace

void copy_batch(RunLists* runs, int source_order, CuStream stream) {
  if (runs->sizes.empty() || copy_together(runs, source_order, stream)) return;
  copy_one_by_one(*runs, stream);
}

}  // namespace attnstore
