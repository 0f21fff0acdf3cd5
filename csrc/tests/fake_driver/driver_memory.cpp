// SPDX-License-Identifier: Apache-2.0
// The driver's calls about devices, contexts and memory.
#include <dlfcn.h>

#include <iterator>

#include "tests/fake_driver/state.h"

using fake::Kind;
using fake::Result;
using fake::state;

namespace {

struct ErrorText {
  Result error;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {fake::kSuccess, "CUDA_SUCCESS", "no error"},
    {fake::kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {fake::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {fake::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {fake::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {fake::kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {fake::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {fake::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {fake::kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {fake::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {fake::kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {fake::kTimeout, "CUDA_ERROR_LAUNCH_TIMEOUT", "the streams wait for each other"},
    {fake::kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {fake::kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {fake::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {fake::kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(Result error) {
  for (const ErrorText& one : kErrors) {
    if (one.error == error) return &one;
  }
  return nullptr;
}

constexpr unsigned int kDeviceMap = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP
constexpr int kMajor = 75;              // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR

std::uint64_t address_of(const void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

bool is_device(int device) { return device >= 0 && device < state().devices; }

}  // namespace

Result cuInit(unsigned int /*flags*/) {
  FAKE_CALL(cuInit, kNothing);
  fake::lasting().is_initialized = true;
  return fake::kSuccess;
}

Result cuDriverGetVersion(int* version) {
  FAKE_CALL(cuDriverGetVersion, kNothing);
  *version = state().version;
  return fake::kSuccess;
}

// As the real one: the newest variant that `version` knows, and that this driver has.
Result cuGetProcAddress_v2(const char* symbol, void** function, int version,
                           std::uint64_t /*flags*/, int* status) {
  FAKE_CALL(cuGetProcAddress_v2, kNothing);
  std::string name = symbol;
  *function = nullptr;
  const int both = version < state().version ? version : state().version;
  const bool is_batch = name == "cuMemcpyBatchAsync";
  if (!is_batch || both >= 12080) {
    Dl_info self = {};
    dladdr(reinterpret_cast<void*>(&cuInit), &self);
    void* const library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!is_batch || both >= fake::kNewest) *function = dlsym(library, (name + "_v2").c_str());
    if (*function == nullptr) *function = dlsym(library, name.c_str());
    dlclose(library);
  }
  if (status != nullptr) *status = *function == nullptr ? (is_batch ? 2 : 1) : 0;
  return *function == nullptr ? fake::kNotFound : fake::kSuccess;
}

Result cuGetErrorName(Result error, const char** name) {
  const ErrorText* const found = find_error(error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? fake::kInvalidValue : fake::kSuccess;
}

Result cuGetErrorString(Result error, const char** text) {
  const ErrorText* const found = find_error(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? fake::kInvalidValue : fake::kSuccess;
}

Result cuDeviceGet(int* device, int ordinal) {
  FAKE_CALL(cuDeviceGet, kDriver);
  if (!is_device(ordinal)) return fake::kInvalidDevice;
  *device = ordinal;
  return fake::kSuccess;
}

Result cuDeviceGetCount(int* count) {
  FAKE_CALL(cuDeviceGetCount, kDriver);
  *count = state().devices;
  return fake::kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  FAKE_CALL(cuDeviceGetAttribute, kDriver);
  if (!is_device(device)) return fake::kInvalidDevice;
  *value = attribute == kMajor ? 9 : 0;
  return fake::kSuccess;
}

Result cuDevicePrimaryCtxRetain(fake::Context** context, int device) {
  FAKE_CALL(cuDevicePrimaryCtxRetain, kDriver);
  if (!is_device(device)) return fake::kInvalidDevice;
  *context = &fake::lasting().contexts[device];
  return fake::kSuccess;
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
  FAKE_CALL(cuDevicePrimaryCtxRelease_v2, kDriver);
  return is_device(device) ? fake::kSuccess : fake::kInvalidDevice;
}

Result cuCtxGetCurrent(fake::Context** context) {
  FAKE_CALL(cuCtxGetCurrent, kDriver);
  *context = fake::context_stack().empty() ? nullptr : fake::context_stack().back();
  return fake::kSuccess;
}

Result cuCtxSetCurrent(fake::Context* context) {
  FAKE_CALL(cuCtxSetCurrent, kDriver);
  if (fake::context_stack().empty()) fake::context_stack().push_back(nullptr);
  fake::context_stack().back() = context;
  return fake::kSuccess;
}

Result cuCtxPushCurrent_v2(fake::Context* context) {
  FAKE_CALL(cuCtxPushCurrent_v2, kDriver);
  fake::context_stack().push_back(context);
  return fake::kSuccess;
}

Result cuCtxPopCurrent_v2(fake::Context** context) {
  FAKE_CALL(cuCtxPopCurrent_v2, kDriver);
  if (fake::context_stack().empty()) return fake::kInvalidContext;
  if (context != nullptr) *context = fake::context_stack().back();
  fake::context_stack().pop_back();
  return fake::kSuccess;
}

Result cuCtxGetDevice(int* device) {
  FAKE_CALL(cuCtxGetDevice, kContext);
  *device = fake::current_device();
  return fake::kSuccess;
}

Result cuCtxSynchronize() {
  FAKE_CALL(cuCtxSynchronize, kContext);
  fake::Gpu& gpu = state().gpu;
  const int device = fake::current_device();
  return fake::after_waiting(gpu.run_until([&] { return gpu.is_idle(device); }));
}

// ---- memory ----------------------------------------------------------------------------

namespace {

std::uint64_t allocate(std::size_t num_bytes, Kind kind) {
  auto memory = std::make_unique<std::byte[]>(num_bytes);
  const std::uint64_t address = address_of(memory.get());
  for (std::size_t i = 0; i < num_bytes; ++i) memory[i] = std::byte{77};  // nobody's
  state().gpu.memory.add(address, num_bytes, kind);
  state().allocations[address] = std::move(memory);
  return address;
}

Result release(std::uint64_t address, Kind kind) {
  if (!state().gpu.memory.remove(address, kind)) return fake::kInvalidValue;
  state().allocations.erase(address);
  return fake::kSuccess;
}

}  // namespace

Result cuMemAlloc_v2(fake::Address* address, std::size_t num_bytes) {
  FAKE_CALL(cuMemAlloc_v2, kContext);
  if (num_bytes == 0) return fake::kInvalidValue;
  *address = allocate(num_bytes, Kind::kHbm);
  return fake::kSuccess;
}

Result cuMemFree_v2(fake::Address address) {
  FAKE_CALL(cuMemFree_v2, kContext);
  // As the real one, which waits for all that may use the memory.
  state().gpu.run_until([] { return state().gpu.is_idle(-1); });
  return release(address, Kind::kHbm);
}

Result cuMemHostAlloc(void** memory, std::size_t num_bytes, unsigned int /*flags*/) {
  FAKE_CALL(cuMemHostAlloc, kContext);
  if (num_bytes == 0) return fake::kInvalidValue;
  *memory = reinterpret_cast<void*>(allocate(num_bytes, Kind::kShared));
  return fake::kSuccess;
}

Result cuMemFreeHost(void* memory) {
  FAKE_CALL(cuMemFreeHost, kContext);
  state().gpu.run_until([] { return state().gpu.is_idle(-1); });
  return release(address_of(memory), Kind::kShared);
}

Result cuMemHostRegister_v2(void* memory, std::size_t num_bytes, unsigned int flags) {
  FAKE_CALL(cuMemHostRegister_v2, kContext);
  fake::State& all = state();
  if (memory == nullptr || num_bytes == 0) return fake::kInvalidValue;
  if (num_bytes > all.register_max) return fake::kInvalidValue;
  if (all.gpu.memory.bytes(Kind::kPinned) + num_bytes > all.register_total) {
    return fake::kOutOfMemory;
  }
  if ((flags & kDeviceMap) == 0) return fake::kInvalidValue;  // nothing of ours wants it unmapped
  const bool is_new = all.gpu.memory.add(address_of(memory), num_bytes, Kind::kPinned);
  return is_new ? fake::kSuccess : fake::kAlreadyRegistered;
}

// Unlike the real one this does not wait: what is in flight then finds nothing there.
Result cuMemHostUnregister(void* memory) {
  FAKE_CALL(cuMemHostUnregister, kContext);
  const bool was_there = state().gpu.memory.remove(address_of(memory), Kind::kPinned);
  return was_there ? fake::kSuccess : fake::kNotRegistered;
}

Result cuMemHostGetDevicePointer_v2(fake::Address* address, void* memory, unsigned int flags) {
  FAKE_CALL(cuMemHostGetDevicePointer_v2, kContext);
  if (flags != 0) return fake::kInvalidValue;
  *address = state().gpu.memory.device_address(address_of(memory));
  return *address == 0 ? fake::kInvalidValue : fake::kSuccess;
}
