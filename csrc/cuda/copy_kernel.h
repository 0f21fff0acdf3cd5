// SPDX-License-Identifier: Apache-2.0
// The kernel that gathers and scatters pages: page-locked host memory is read and written in place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/copy_words.h"

namespace attnstore {

constexpr std::uint32_t kThreadsPerBlock = 1024;

// Appends one job to the stream. `word_bytes` is 16, 4 or 1, and divides every address and size of
// the job. The job's arrays are in device memory, and unchanged until the kernel is over. Of the
// device's multiprocessors at most `thread_blocks` are taken, for as long as it runs.
cudaError_t launch_copy(const CopyJob& job, std::uint32_t word_bytes, std::uint32_t thread_blocks,
                        cudaStream_t stream);

}  // namespace attnstore
