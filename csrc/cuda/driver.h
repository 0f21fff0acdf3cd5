// SPDX-License-Identifier: Apache-2.0
// The part of NVIDIA's driver API that we use, declared here: a build needs no CUDA toolkit, and
// the module can be imported where there is no driver. A test compares it with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace attnstore {

using CuResult = int;  // CUresult
using CuAddress = unsigned long long;
using CuDevice = int;
using CuContext = struct CUctx_st*;
using CuStream = struct CUstream_st*;  // also what PyTorch calls cudaStream_t
using CuModule = struct CUmod_st*;
using CuFunction = struct CUfunc_st*;

constexpr CuResult kCuSuccess = 0;
constexpr CuResult kCuNotSupported = 801;          // CUDA_ERROR_NOT_SUPPORTED
constexpr int kCuCapabilityMajor = 75;             // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kCuCapabilityMinor = 76;             // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr unsigned int kCuRegisterPortable = 1;    // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned int kCuRegisterMapped = 2;      // CU_MEMHOSTREGISTER_DEVICEMAP
constexpr int kCuSourceInStreamOrder = 1;          // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr int kCuSourceInAnyOrder = 3;             // CU_MEMCPY_SRC_ACCESS_ORDER_ANY
constexpr unsigned int kCuOverlapWithCompute = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

struct CuLocation {  // CUmemLocation
  int type;
  int id;
};

struct CuCopyAttributes {  // CUmemcpyAttributes
  int source_order;
  CuLocation source_hint;
  CuLocation target_hint;
  unsigned int flags;
};

// Each has the driver's own name, with a small first letter and without "cu".
struct Driver {
  CuResult (*init)(unsigned int flags);
  CuResult (*driverGetVersion)(int* version);
  CuResult (*getErrorName)(CuResult error, const char** name);
  CuResult (*getErrorString)(CuResult error, const char** text);
  CuResult (*deviceGet)(CuDevice* device, int ordinal);
  CuResult (*deviceGetAttribute)(int* value, int attribute, CuDevice device);
  CuResult (*devicePrimaryCtxRetain)(CuContext* context, CuDevice device);
  CuResult (*ctxGetCurrent)(CuContext* context);
  CuResult (*ctxPushCurrent)(CuContext context);
  CuResult (*ctxPopCurrent)(CuContext* context);
  CuResult (*memHostRegister)(void* memory, std::size_t num_bytes, unsigned int flags);
  CuResult (*memHostUnregister)(void* memory);
  CuResult (*memHostGetDevicePointer)(CuAddress* address, void* memory, unsigned int flags);
  CuResult (*memcpyAsync)(CuAddress target, CuAddress source, std::size_t num_bytes,
                          CuStream stream);
  // Null where the driver is older than CUDA 12.8 (570). Newer ones keep this form of the call.
  CuResult (*memcpyBatchAsync)(CuAddress* targets, CuAddress* sources, std::size_t* sizes,
                               std::size_t count, CuCopyAttributes* attributes,
                               std::size_t* attributes_from, std::size_t num_attributes,
                               std::size_t* failed, CuStream stream);
  CuResult (*moduleLoadData)(CuModule* module, const void* image);
  CuResult (*moduleUnload)(CuModule module);
  CuResult (*moduleGetFunction)(CuFunction* function, CuModule module, const char* name);
  CuResult (*launchKernel)(CuFunction function, unsigned int grid_x, unsigned int grid_y,
                           unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                           unsigned int block_z, unsigned int shared_bytes, CuStream stream,
                           void** params, void** extra);
};

// The driver, opened and initialised by the first call of the process. Throws std::runtime_error
// that says what is missing. Thread-safe.
const Driver& driver();

// Why driver() throws; "" where it does not.
std::string why_no_driver();

// Throws std::runtime_error that says which call failed and how.
void check_cuda(CuResult result, const char* call);

}  // namespace attnstore
