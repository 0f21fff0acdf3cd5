// SPDX-License-Identifier: Apache-2.0
// Copies of many runs by the copy engines (DMA), which take no multiprocessor from the model.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "copy/page_runs.h"

namespace attnstore {

// Appends copies of these runs to the stream, which is not the legacy default stream. They do not
// overlap, and are carried out in any order among themselves. Sources are read in stream order.
// Throws std::runtime_error.
void copy_batch(const std::vector<Run>& runs, cudaStream_t stream);

}  // namespace attnstore
