// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/copy_kernel.h"

namespace attnstore {

namespace {

template <typename Word>
__global__ void __launch_bounds__(kThreadsPerBlock)
    copy_pages(const __grid_constant__ CopyJob job) {
  copy_words<Word>(job, blockIdx.x * kThreadsPerBlock + threadIdx.x, gridDim.x * kThreadsPerBlock);
}

}  // namespace

cudaError_t launch_copy(const CopyJob& job, std::uint32_t word_bytes, std::uint32_t thread_blocks,
                        cudaStream_t stream) {
  const std::uint32_t per_block = kThreadsPerBlock * kWordsInFlight;
  const std::uint32_t useful = (job.num_words - 1) / per_block + 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::min({thread_blocks, useful, kGridThreadsMax / kThreadsPerBlock}));
  config.blockDim = dim3(kThreadsPerBlock);
  config.stream = stream;
  if (word_bytes == sizeof(Word16)) return cudaLaunchKernelEx(&config, copy_pages<Word16>, job);
  if (word_bytes == sizeof(Word4)) return cudaLaunchKernelEx(&config, copy_pages<Word4>, job);
  return cudaLaunchKernelEx(&config, copy_pages<Word1>, job);
}

}  // namespace attnstore
