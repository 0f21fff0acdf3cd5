// SPDX-License-Identifier: Apache-2.0
// A CUDA driver that does nothing, at once, and counts what it was asked: what is left is the
// host's own time (benchmarks/cuda_host_time.py). csrc/tests/fake_driver is the one that copies.
#include <cstddef>
#include <cstdint>

#define ATTNSTORE_FREE extern "C" __attribute__((visibility("default")))

namespace {

std::uint64_t launches = 0;
std::uint64_t copies = 0;
std::uint64_t batches = 0;
std::uint64_t descriptors = 0;
int context = 0;

}  // namespace

#define ATTNSTORE_FREE_CALL(name) \
  ATTNSTORE_FREE int name(...) { return 0; }

ATTNSTORE_FREE_CALL(cuInit)
ATTNSTORE_FREE_CALL(cuGetErrorName)
ATTNSTORE_FREE_CALL(cuGetErrorString)
ATTNSTORE_FREE_CALL(cuDeviceGet)
ATTNSTORE_FREE_CALL(cuCtxPushCurrent_v2)
ATTNSTORE_FREE_CALL(cuCtxPopCurrent_v2)
ATTNSTORE_FREE_CALL(cuMemHostRegister_v2)
ATTNSTORE_FREE_CALL(cuMemHostUnregister)
ATTNSTORE_FREE_CALL(cuModuleLoadData)
ATTNSTORE_FREE_CALL(cuModuleUnload)
ATTNSTORE_FREE_CALL(cuModuleGetFunction)

ATTNSTORE_FREE int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

ATTNSTORE_FREE int cuDeviceGetAttribute(int* value, int /*attribute*/, int /*device*/) {
  *value = 9;
  return 0;
}

ATTNSTORE_FREE int cuDevicePrimaryCtxRetain(void** found, int /*device*/) {
  *found = &context;
  return 0;
}

ATTNSTORE_FREE int cuCtxGetCurrent(void** found) {
  *found = &context;
  return 0;
}

ATTNSTORE_FREE int cuMemHostGetDevicePointer_v2(std::uint64_t* address, void* memory,
                                                unsigned int /*flags*/) {
  *address = reinterpret_cast<std::uint64_t>(memory);
  return 0;
}

ATTNSTORE_FREE int cuMemcpyAsync(std::uint64_t /*target*/, std::uint64_t /*source*/,
                                 std::size_t /*num_bytes*/, void* /*stream*/) {
  ++copies;
  return 0;
}

ATTNSTORE_FREE int cuMemcpyBatchAsync(void* /*targets*/, void* /*sources*/, void* /*sizes*/,
                                      std::size_t count, void* /*attributes*/,
                                      void* /*attributes_from*/, std::size_t /*num_attributes*/,
                                      void* /*failed*/, void* /*stream*/) {
  ++batches;
  descriptors += count;
  return 0;
}

ATTNSTORE_FREE int cuLaunchKernel(...) {
  ++launches;
  return 0;
}

// Since it was last asked: launches, single copies, batches, and the runs of the batches.
ATTNSTORE_FREE void free_driver_counts(std::uint64_t* found) {
  const std::uint64_t counts[] = {launches, copies, batches, descriptors};
  for (int i = 0; i < 4; ++i) found[i] = counts[i];
  launches = copies = batches = descriptors = 0;
}
