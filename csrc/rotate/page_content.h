// SPDX-License-Identifier: Apache-2.0
// Where the elements of K and V lie within a page. Kernels have orders of their own; all that we
// know split tokens and dims once at most, so that a few numbers describe them. One source for the
// CPU and for the device.
//
//   token = t1 * token_group + t0         dim = d1 * dim_group + d0
//   offset = base + head * head_step + t1 * token_outer + t0 * token_inner
//                                    + d1 * dim_outer   + d0 * dim_inner
//
// Offsets are in elements, from the page's beginning in its slot, where the runs of the page stand
// one after the other (page_map.h).
#pragma once

#include <cstdint>

#include "copy/page_map.h"

#if defined(__CUDACC__)
#define ATTNSTORE_ALWAYS_INLINE __forceinline__
#else
// What is compiled for several processors has to be a part of each (rotate_block.h): a copy of its
// own would be one for all of them.
#define ATTNSTORE_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

namespace attnstore {

// K's or V's part of it.
struct ContentSide {
  std::int64_t base;
  std::int64_t head_step;
  std::int64_t token_group;
  std::int64_t token_outer;
  std::int64_t token_inner;
  std::int64_t dim_group;
  std::int64_t dim_outer;
  std::int64_t dim_inner;
};

struct ContentMap {
  ContentSide key;
  ContentSide value;
};

ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::int64_t token_offset(const ContentSide& side,
                                                                        std::int64_t token) {
  return token / side.token_group * side.token_outer + token % side.token_group * side.token_inner;
}

ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::int64_t dim_offset(const ContentSide& side,
                                                                      std::int64_t dim) {
  return dim / side.dim_group * side.dim_outer + dim % side.dim_group * side.dim_inner;
}

// In elements. Checks nothing.
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::int64_t element_offset(const ContentSide& side,
                                                                          std::int64_t head,
                                                                          std::int64_t token,
                                                                          std::int64_t dim) {
  return side.base + head * side.head_step + token_offset(side, token) + dim_offset(side, dim);
}

}  // namespace attnstore
