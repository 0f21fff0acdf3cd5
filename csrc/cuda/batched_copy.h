// SPDX-License-Identifier: Apache-2.0
// Copies of many runs by the copy engines (DMA), which take no multiprocessor from the model.
#pragma once

#include <vector>

#include "copy/page_runs.h"
#include "cuda/driver.h"

namespace attnstore {

// Appends copies of these runs to the stream, which is not the legacy default stream. They do not
// overlap, and are carried out in any order among themselves.
//
// `source_order`: kCuSourceInStreamOrder, or kCuSourceInAnyOrder for sources that nothing given to
// the stream before writes: the driver may read them earlier. Throws std::runtime_error.
void copy_batch(const std::vector<Run>& runs, int source_order, CuStream stream);

}  // namespace attnstore
