// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/copy_kernel.h"
#include "cuda/rotate_kernel.h"

namespace attnstore {

namespace {

template <typename Element, typename Word>
__global__ void __launch_bounds__(kThreadsPerBlock)
    move_tokens(const __grid_constant__ RotateJob job) {
  rotate_words<Element, Word>(job, blockIdx.x * kThreadsPerBlock + threadIdx.x,
                              gridDim.x * kThreadsPerBlock);
}

template <typename Element>
cudaError_t launch(const cudaLaunchConfig_t& config, const RotateJob& job, bool is_wide) {
  if (is_wide) return cudaLaunchKernelEx(&config, move_tokens<Element, Word16>, job);
  return cudaLaunchKernelEx(&config, move_tokens<Element, typename Element::Bits>, job);
}

}  // namespace

cudaError_t launch_rotation(const RotateJob& job, ElementType type, bool is_wide,
                            std::uint32_t thread_blocks, cudaStream_t stream) {
  const std::uint32_t per_block = kThreadsPerBlock * kItemsInFlight;
  const std::uint32_t useful = (job.num_items - 1) / per_block + 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::min({thread_blocks, useful, kGridThreadsMax / kThreadsPerBlock}));
  config.blockDim = dim3(kThreadsPerBlock);
  config.stream = stream;
  switch (type) {
    case ElementType::kBfloat16:
      return launch<Bfloat16>(config, job, is_wide);
    case ElementType::kFloat16:
      return launch<Float16>(config, job, is_wide);
    case ElementType::kFloat32:
      break;
  }
  return launch<Float32>(config, job, is_wide);
}

}  // namespace attnstore
