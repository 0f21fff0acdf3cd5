// SPDX-License-Identifier: Apache-2.0
// Copies of many runs by the copy engines (DMA), which take no multiprocessor from the model.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/driver.h"

namespace attnstore {

// The runs as the driver takes them; all have as many.
struct RunLists {
  std::vector<CuAddress> sources;
  std::vector<CuAddress> targets;
  std::vector<std::size_t> sizes;
};

// Appends copies of these runs to the stream, which is not the legacy default stream. They do not
// overlap, and are carried out in any order among themselves. The driver has read the lists when
// this returns, and changes none.
//
// `source_order`: kCuSourceInStreamOrder, or kCuSourceInAnyOrder for sources that nothing given to
// the stream before writes: the driver may read them earlier. Throws std::runtime_error.
void copy_batch(RunLists* runs, int source_order, CuStream stream);

}  // namespace attnstore
