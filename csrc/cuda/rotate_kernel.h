// SPDX-License-Identifier: Apache-2.0
// The kernel that moves tokens to other positions: it reads page-locked host memory in place, turns
// K, and writes to the KV tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/rotate_words.h"
#include "rotate/rotation.h"

namespace attnstore {

// Appends one job to the stream. `is_wide`: its words are 16 bytes (has_wide_words). The job's
// arrays are in device memory, and unchanged until the kernel is over. Of the device's
// multiprocessors at most `thread_blocks` are taken, for as long as it runs.
cudaError_t launch_rotation(const RotateJob& job, ElementType type, bool is_wide,
                            std::uint32_t thread_blocks, cudaStream_t stream);

}  // namespace attnstore
