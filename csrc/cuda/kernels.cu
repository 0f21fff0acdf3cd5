// SPDX-License-Identifier: Apache-2.0
// The kernels, under the names by which kernels.cpp asks for them. tools/make_kernels.py compiles
// this file alone.
#include "cuda/code_words.h"
#include "cuda/copy_words.h"
#include "cuda/rotate_words.h"

namespace attnstore {

#define ATTNSTORE_COPY_KERNEL(name, Word)                              \
  extern "C" __global__ void __launch_bounds__(kThreadsPerBlock)       \
      name(const __grid_constant__ CopyJob job) {                      \
    copy_words<Word>(job, blockIdx.x * kThreadsPerBlock + threadIdx.x, \
                     gridDim.x * kThreadsPerBlock);                    \
  }
#define ATTNSTORE_CODE_KERNEL(name, Word, is_decoding)                              \
  extern "C" __global__ void __launch_bounds__(kThreadsPerBlock)                    \
      name(const __grid_constant__ CodeJob job) {                                   \
    code_words<Word, is_decoding>(job, blockIdx.x * kThreadsPerBlock + threadIdx.x, \
                                  gridDim.x * kThreadsPerBlock);                    \
  }
#define ATTNSTORE_MOVE_KERNEL(name, Element, Word)                                \
  extern "C" __global__ void __launch_bounds__(kThreadsPerBlock)                  \
      name(const __grid_constant__ RotateJob job) {                               \
    rotate_words<Element, Word>(job, blockIdx.x * kThreadsPerBlock + threadIdx.x, \
                                gridDim.x * kThreadsPerBlock);                    \
  }

ATTNSTORE_COPY_KERNEL(copy_pages_16, Word16)
ATTNSTORE_COPY_KERNEL(copy_pages_4, Word4)
ATTNSTORE_COPY_KERNEL(copy_pages_1, Word1)
ATTNSTORE_CODE_KERNEL(decode_pages_16, Word16, true)
ATTNSTORE_CODE_KERNEL(decode_pages_2, std::uint16_t, true)
ATTNSTORE_CODE_KERNEL(encode_pages_16, Word16, false)
ATTNSTORE_CODE_KERNEL(encode_pages_2, std::uint16_t, false)
ATTNSTORE_MOVE_KERNEL(move_tokens_bf16, Bfloat16, Bfloat16::Bits)
ATTNSTORE_MOVE_KERNEL(move_tokens_bf16_16, Bfloat16, Word16)
ATTNSTORE_MOVE_KERNEL(move_tokens_f16, Float16, Float16::Bits)
ATTNSTORE_MOVE_KERNEL(move_tokens_f16_16, Float16, Word16)
ATTNSTORE_MOVE_KERNEL(move_tokens_f32, Float32, Float32::Bits)
ATTNSTORE_MOVE_KERNEL(move_tokens_f32_16, Float32, Word16)

}  // namespace attnstore
