// SPDX-License-Identifier: Apache-2.0
// Compiled where cuda.h is, and not run: is cuda/driver.h as cuda.h?
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "cuda/driver.h"

namespace attnstore {

// Their enums are our integers, and their structs have other names here.
template <typename Ours, typename Theirs>
constexpr bool kIsAlike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;

template <typename Ours, typename Theirs>
struct Calls : std::false_type {};
template <typename... Ours, typename... Theirs>
struct Calls<CuResult (*)(Ours...), CUresult (*)(Theirs...)>
    : std::bool_constant<sizeof...(Ours) == sizeof...(Theirs)> {
  static_assert((kIsAlike<Ours, Theirs> && ...));
};

#define ATTNSTORE_CHECK(ours, theirs) \
  static_assert(Calls<decltype(Driver::ours), decltype(&theirs)>())

ATTNSTORE_CHECK(init, cuInit);
ATTNSTORE_CHECK(driverGetVersion, cuDriverGetVersion);
ATTNSTORE_CHECK(getErrorName, cuGetErrorName);
ATTNSTORE_CHECK(getErrorString, cuGetErrorString);
ATTNSTORE_CHECK(deviceGet, cuDeviceGet);
ATTNSTORE_CHECK(deviceGetAttribute, cuDeviceGetAttribute);
ATTNSTORE_CHECK(devicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
ATTNSTORE_CHECK(ctxGetCurrent, cuCtxGetCurrent);
ATTNSTORE_CHECK(ctxPushCurrent, cuCtxPushCurrent);
ATTNSTORE_CHECK(ctxPopCurrent, cuCtxPopCurrent);
ATTNSTORE_CHECK(memHostRegister, cuMemHostRegister);
ATTNSTORE_CHECK(memHostUnregister, cuMemHostUnregister);
ATTNSTORE_CHECK(memHostGetDevicePointer, cuMemHostGetDevicePointer);
ATTNSTORE_CHECK(memcpyAsync, cuMemcpyAsync);
ATTNSTORE_CHECK(moduleLoadData, cuModuleLoadData);
ATTNSTORE_CHECK(moduleUnload, cuModuleUnload);
ATTNSTORE_CHECK(moduleGetFunction, cuModuleGetFunction);
ATTNSTORE_CHECK(launchKernel, cuLaunchKernel);
// cuda.h 13 has the newer form under this name; libcuda.so.1 keeps the older one.
using BatchAsync = CUresult (*)(CUdeviceptr*, CUdeviceptr*, std::size_t*, std::size_t,
                                CUmemcpyAttributes*, std::size_t*, std::size_t, std::size_t*,
                                CUstream);
static_assert(Calls<decltype(Driver::memcpyBatchAsync), BatchAsync>());

static_assert(sizeof(CuCopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(CuCopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(CuCopyAttributes, target_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(CuCopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(sizeof(CuLocation) == sizeof(CUmemLocation));

static_assert(kCuSuccess == CUDA_SUCCESS);
static_assert(kCuNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kCuCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kCuCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kCuRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kCuRegisterMapped == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kCuSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(kCuSourceInAnyOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
static_assert(kCuOverlapWithCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);

}  // namespace attnstore
