// SPDX-License-Identifier: Apache-2.0
#include "cuda/batched_copy.h"

#include <cstddef>

#include "cuda/cuda_error.h"

namespace attnstore {

namespace {

void copy_one_by_one(const std::vector<Run>& runs, cudaStream_t stream) {
  for (const Run& run : runs) {
    check_cuda(cudaMemcpyAsync(run.target, run.source, run.num_bytes, cudaMemcpyDefault, stream),
               "cudaMemcpyAsync");
  }
}

#if CUDART_VERSION >= 12080
// One call of the driver for all runs. False if the driver is older than this call.
bool copy_together(const std::vector<Run>& runs, cudaStream_t stream) {
  std::vector<void*> sources;
  std::vector<void*> targets;
  std::vector<std::size_t> sizes;
  sources.reserve(runs.size());
  targets.reserve(runs.size());
  sizes.reserve(runs.size());
  for (const Run& run : runs) {
    sources.push_back(const_cast<std::byte*>(run.source));
    targets.push_back(run.target);
    sizes.push_back(run.num_bytes);
  }
  // Not cudaMemcpySrcAccessOrderAny: a drain reads what the kernel before it has just written.
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t holds_from = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t status = cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(),
                                                  runs.size(), &attributes, &holds_from, 1, stream);
#else
  std::size_t failed = 0;
  const cudaError_t status =
      cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), runs.size(), &attributes,
                           &holds_from, 1, &failed, stream);
#endif
  if (status == cudaErrorCallRequiresNewerDriver || status == cudaErrorNotSupported) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  check_cuda(status, "cudaMemcpyBatchAsync");
  return true;
}
#endif

}  // namespace

void copy_batch(const std::vector<Run>& runs, cudaStream_t stream) {
  if (runs.empty()) return;
#if CUDART_VERSION >= 12080
  if (copy_together(runs, stream)) return;
#endif
  copy_one_by_one(runs, stream);
}

}  // namespace attnstore
