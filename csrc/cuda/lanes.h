// SPDX-License-Identifier: Apache-2.0
// What the 32 lanes of a warp do together. On the device each lane is a thread, and has its own
// value in registers. Compiled for the host, the first thread of a warp does the work of all lanes,
// one after the other: so a step between two exchanges is one each_lane().
#pragma once

#include <cstdint>

#include "copy/page_map.h"

namespace attnstore {

constexpr std::uint32_t kWarpLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffU;

// A value of each lane.
template <typename Value>
struct Lanes {
#if defined(__CUDA_ARCH__)
  Value mine;
  ATTNSTORE_HOST_DEVICE Value& operator[](std::uint32_t /*lane*/) { return mine; }
  ATTNSTORE_HOST_DEVICE const Value& operator[](std::uint32_t /*lane*/) const { return mine; }
#else
  Value all[kWarpLanes] = {};
  Value& operator[](std::uint32_t lane) { return all[lane]; }
  const Value& operator[](std::uint32_t lane) const { return all[lane]; }
#endif
};

// Whether this thread works for its warp, as all do on the device.
ATTNSTORE_HOST_DEVICE inline bool works_for_warp(std::uint32_t thread) {
#if defined(__CUDA_ARCH__)
  static_cast<void>(thread);
  return true;
#else
  return thread % kWarpLanes == 0;
#endif
}

template <typename Body>
ATTNSTORE_HOST_DEVICE inline void each_lane(const Body& body) {
#if defined(__CUDA_ARCH__)
  body(threadIdx.x % kWarpLanes);
#else
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) body(lane);
#endif
}

using Numbers = Lanes<std::uint32_t>;

ATTNSTORE_HOST_DEVICE inline std::uint32_t sum_of(const Numbers& numbers) {
#if defined(__CUDA_ARCH__)
  return __reduce_add_sync(kAllLanes, numbers.mine);
#else
  std::uint32_t sum = 0;
  for (const std::uint32_t number : numbers.all) sum += number;
  return sum;
#endif
}

ATTNSTORE_HOST_DEVICE inline std::uint32_t least_of(const Numbers& numbers) {
#if defined(__CUDA_ARCH__)
  return __reduce_min_sync(kAllLanes, numbers.mine);
#else
  std::uint32_t least = numbers.all[0];
  for (const std::uint32_t number : numbers.all) least = number < least ? number : least;
  return least;
#endif
}

ATTNSTORE_HOST_DEVICE inline std::uint32_t most_of(const Numbers& numbers) {
#if defined(__CUDA_ARCH__)
  return __reduce_max_sync(kAllLanes, numbers.mine);
#else
  std::uint32_t most = 0;
  for (const std::uint32_t number : numbers.all) most = number > most ? number : most;
  return most;
#endif
}

// To each lane, the sum of those before it.
ATTNSTORE_HOST_DEVICE inline Numbers sums_before(const Numbers& numbers) {
  Numbers sums;
#if defined(__CUDA_ARCH__)
  std::uint32_t sum = numbers.mine;
  for (unsigned back = 1; back < kWarpLanes; back *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, back);
    if (threadIdx.x % kWarpLanes >= back) sum += other;
  }
  sums.mine = sum - numbers.mine;
#else
  std::uint32_t sum = 0;
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    sums.all[lane] = sum;
    sum += numbers.all[lane];
  }
#endif
  return sums;
}

// To each lane, the number of the lane that it names.
ATTNSTORE_HOST_DEVICE inline Numbers from_lanes(const Numbers& numbers, const Numbers& named) {
  Numbers found;
#if defined(__CUDA_ARCH__)
  found.mine = __shfl_sync(kAllLanes, numbers.mine, static_cast<int>(named.mine));
#else
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    found.all[lane] = numbers.all[named.all[lane] % kWarpLanes];
  }
#endif
  return found;
}

}  // namespace attnstore
