// SPDX-License-Identifier: Apache-2.0
// What the fake driver exports under the driver's own names, with the signatures of cuda.h (CUDA
// 13.0): the only calls that the host code may make. And what tests tell it: fake_*.
#pragma once

#include <cstddef>
#include <cstdint>

#define ATTNSTORE_FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

struct Context {
  int device;
};
struct Function;
struct Module;
struct Stream;
struct EventHandle;

using Result = int;
using Address = unsigned long long;

struct Location {
  int type;
  int id;
};
struct CopyAttributes {
  int source_order;
  Location source_hint;
  Location target_hint;
  unsigned int flags;
};

constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kNotReady = 600;
constexpr Result kIllegalAddress = 700;
constexpr Result kTimeout = 702;  // said where the streams wait for each other
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;
constexpr Result kNotSupported = 801;
constexpr Result kUnknown = 999;

}  // namespace fake

// ---- the driver's ----------------------------------------------------------------------

ATTNSTORE_FAKE_EXPORT fake::Result cuInit(unsigned int flags);
ATTNSTORE_FAKE_EXPORT fake::Result cuDriverGetVersion(int* version);
ATTNSTORE_FAKE_EXPORT fake::Result cuGetProcAddress_v2(const char* symbol, void** function,
                                                       int version, std::uint64_t flags,
                                                       int* status);
ATTNSTORE_FAKE_EXPORT fake::Result cuGetErrorName(fake::Result error, const char** name);
ATTNSTORE_FAKE_EXPORT fake::Result cuGetErrorString(fake::Result error, const char** text);
ATTNSTORE_FAKE_EXPORT fake::Result cuDeviceGet(int* device, int ordinal);
ATTNSTORE_FAKE_EXPORT fake::Result cuDeviceGetCount(int* count);
ATTNSTORE_FAKE_EXPORT fake::Result cuDeviceGetAttribute(int* value, int attribute, int device);
ATTNSTORE_FAKE_EXPORT fake::Result cuDevicePrimaryCtxRetain(fake::Context** context, int device);
ATTNSTORE_FAKE_EXPORT fake::Result cuDevicePrimaryCtxRelease_v2(int device);
ATTNSTORE_FAKE_EXPORT fake::Result cuCtxGetCurrent(fake::Context** context);
ATTNSTORE_FAKE_EXPORT fake::Result cuCtxSetCurrent(fake::Context* context);
ATTNSTORE_FAKE_EXPORT fake::Result cuCtxPushCurrent_v2(fake::Context* context);
ATTNSTORE_FAKE_EXPORT fake::Result cuCtxPopCurrent_v2(fake::Context** context);
ATTNSTORE_FAKE_EXPORT fake::Result cuCtxGetDevice(int* device);
ATTNSTORE_FAKE_EXPORT fake::Result cuCtxSynchronize();

ATTNSTORE_FAKE_EXPORT fake::Result cuMemAlloc_v2(fake::Address* address, std::size_t num_bytes);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemFree_v2(fake::Address address);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemHostAlloc(void** memory, std::size_t num_bytes,
                                                  unsigned int flags);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemFreeHost(void* memory);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemHostRegister_v2(void* memory, std::size_t num_bytes,
                                                        unsigned int flags);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemHostUnregister(void* memory);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemHostGetDevicePointer_v2(fake::Address* address,
                                                                void* memory, unsigned int flags);

ATTNSTORE_FAKE_EXPORT fake::Result cuStreamCreateWithPriority(fake::Stream** stream,
                                                              unsigned int flags, int priority);
ATTNSTORE_FAKE_EXPORT fake::Result cuStreamCreate(fake::Stream** stream, unsigned int flags);
ATTNSTORE_FAKE_EXPORT fake::Result cuStreamDestroy_v2(fake::Stream* stream);
ATTNSTORE_FAKE_EXPORT fake::Result cuStreamQuery(fake::Stream* stream);
ATTNSTORE_FAKE_EXPORT fake::Result cuStreamSynchronize(fake::Stream* stream);
ATTNSTORE_FAKE_EXPORT fake::Result cuStreamWaitEvent(fake::Stream* stream, fake::EventHandle* event,
                                                     unsigned int flags);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventCreate(fake::EventHandle** event, unsigned int flags);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventDestroy_v2(fake::EventHandle* event);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventRecord(fake::EventHandle* event, fake::Stream* stream);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventQuery(fake::EventHandle* event);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventSynchronize(fake::EventHandle* event);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventElapsedTime(float* ms, fake::EventHandle* start,
                                                      fake::EventHandle* end);
ATTNSTORE_FAKE_EXPORT fake::Result cuEventElapsedTime_v2(float* ms, fake::EventHandle* start,
                                                         fake::EventHandle* end);

ATTNSTORE_FAKE_EXPORT fake::Result cuMemcpyAsync(fake::Address target, fake::Address source,
                                                 std::size_t num_bytes, fake::Stream* stream);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemcpyHtoDAsync_v2(fake::Address target, const void* source,
                                                        std::size_t num_bytes,
                                                        fake::Stream* stream);
ATTNSTORE_FAKE_EXPORT fake::Result cuMemcpyDtoHAsync_v2(void* target, fake::Address source,
                                                        std::size_t num_bytes,
                                                        fake::Stream* stream);
// Of CUDA 12.8.
ATTNSTORE_FAKE_EXPORT fake::Result cuMemcpyBatchAsync(
    fake::Address* targets, fake::Address* sources, std::size_t* sizes, std::size_t count,
    fake::CopyAttributes* attributes, std::size_t* attributes_from, std::size_t num_attributes,
    std::size_t* failed, fake::Stream* stream);
// Of CUDA 13.0.
ATTNSTORE_FAKE_EXPORT fake::Result cuMemcpyBatchAsync_v2(
    fake::Address* targets, fake::Address* sources, std::size_t* sizes, std::size_t count,
    fake::CopyAttributes* attributes, std::size_t* attributes_from, std::size_t num_attributes,
    fake::Stream* stream);

ATTNSTORE_FAKE_EXPORT fake::Result cuModuleLoadData(fake::Module** module, const void* image);
ATTNSTORE_FAKE_EXPORT fake::Result cuModuleLoadDataEx(fake::Module** module, const void* image,
                                                      unsigned int num_options, int* options,
                                                      void** values);
ATTNSTORE_FAKE_EXPORT fake::Result cuModuleUnload(fake::Module* module);
ATTNSTORE_FAKE_EXPORT fake::Result cuModuleGetFunction(fake::Function** function,
                                                       fake::Module* module, const char* name);
ATTNSTORE_FAKE_EXPORT fake::Result cuLaunchKernel(fake::Function* function, unsigned int grid_x,
                                                  unsigned int grid_y, unsigned int grid_z,
                                                  unsigned int block_x, unsigned int block_y,
                                                  unsigned int block_z, unsigned int shared_bytes,
                                                  fake::Stream* stream, void** params,
                                                  void** extra);
ATTNSTORE_FAKE_EXPORT fake::Result cuLaunchHostFunc(fake::Stream* stream, void (*function)(void*),
                                                    void* data);

// ---- the tests' ------------------------------------------------------------------------

// Processes and GPUs that are new. What was given to older ones is forgotten.
ATTNSTORE_FAKE_EXPORT void fake_reset(std::uint64_t seed);
// From here on this is another process, with a GPU and registrations of its own; at first 0.
ATTNSTORE_FAKE_EXPORT void fake_use(std::uint64_t process);
// "busy": of 100 calls, how many find that time has passed; "eager", "lenient", "scattered" (0 or
// 1): streams.h, memory.h; "driver_version"; "devices"; "register_max" and "register_total" bytes;
// "batch_max" runs of a cuMemcpyBatchAsync, which real ones take more slowly. Returns 0 for a name that is none of these.
ATTNSTORE_FAKE_EXPORT int fake_set(const char* option, std::uint64_t value);
// Calls whose names begin so go well so often, and then one returns `result`. A launch is also a
// call of its kernel's name.
ATTNSTORE_FAKE_EXPORT void fake_fail(const char* call, std::uint64_t after, fake::Result result);
// No call fails as it was told to.
ATTNSTORE_FAKE_EXPORT void fake_forgive();
// What kernels or calls write whose names begin so is wrong from here on; "": nothing.
ATTNSTORE_FAKE_EXPORT void fake_damage(const char* name);
// A call that another library makes: counted, and refused if it was told to be.
ATTNSTORE_FAKE_EXPORT fake::Result fake_call(const char* call);
// The device may access this memory of the process at its own address: HBM, or page-locked.
ATTNSTORE_FAKE_EXPORT void fake_add_memory(std::uint64_t address, std::size_t num_bytes,
                                           int is_hbm);
// It is somebody else's from here on: what is in flight finds nothing there.
ATTNSTORE_FAKE_EXPORT void fake_remove_memory(std::uint64_t address, int is_hbm);
// 0 if no stream can go on.
ATTNSTORE_FAKE_EXPORT int fake_step();
ATTNSTORE_FAKE_EXPORT std::uint64_t fake_clock();
// Calls whose names begin so.
ATTNSTORE_FAKE_EXPORT std::uint64_t fake_count(const char* call);
ATTNSTORE_FAKE_EXPORT std::uint64_t fake_pending(const fake::Stream* stream);
// Registrations that are there.
ATTNSTORE_FAKE_EXPORT std::uint64_t fake_registered();
