// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

namespace attnstore {

namespace {

struct Opened {
  Driver driver = {};
  std::string why_not;
};

template <typename Function>
void find(void* library, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) *missing += std::string(missing->empty() ? "" : ", ") + name;
}

// The names that functions have in libcuda.so.1, which stay when a newer form gets another one.
std::string find_all(void* library, Driver* to) {
  std::string missing;
  std::string may_be_missing;
  find(library, "cuInit", &to->init, &missing);
  find(library, "cuDriverGetVersion", &to->driverGetVersion, &missing);
  find(library, "cuGetErrorName", &to->getErrorName, &missing);
  find(library, "cuGetErrorString", &to->getErrorString, &missing);
  find(library, "cuDeviceGet", &to->deviceGet, &missing);
  find(library, "cuDeviceGetAttribute", &to->deviceGetAttribute, &missing);
  find(library, "cuDevicePrimaryCtxRetain", &to->devicePrimaryCtxRetain, &missing);
  find(library, "cuCtxGetCurrent", &to->ctxGetCurrent, &missing);
  find(library, "cuCtxPushCurrent_v2", &to->ctxPushCurrent, &missing);
  find(library, "cuCtxPopCurrent_v2", &to->ctxPopCurrent, &missing);
  find(library, "cuMemHostRegister_v2", &to->memHostRegister, &missing);
  find(library, "cuMemHostUnregister", &to->memHostUnregister, &missing);
  find(library, "cuMemHostGetDevicePointer_v2", &to->memHostGetDevicePointer, &missing);
  find(library, "cuMemcpyAsync", &to->memcpyAsync, &missing);
  find(library, "cuMemcpyBatchAsync", &to->memcpyBatchAsync, &may_be_missing);
  find(library, "cuModuleLoadData", &to->moduleLoadData, &missing);
  find(library, "cuModuleUnload", &to->moduleUnload, &missing);
  find(library, "cuModuleGetFunction", &to->moduleGetFunction, &missing);
  find(library, "cuLaunchKernel", &to->launchKernel, &missing);
  return missing;
}

std::string error_text(const Driver& from, CuResult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (from.getErrorName(result, &name) != kCuSuccess) name = nullptr;
  if (from.getErrorString(result, &text) != kCuSuccess) text = nullptr;
  if (name == nullptr) return "error " + std::to_string(result);
  return text == nullptr ? name : std::string(name) + ", " + text;
}

// It stays open until the process ends: kernels and memory of the driver may live as long.
Opened open_driver() {
  Opened opened;
  // For tests: another library that stands in for the driver.
  const char* const asked = std::getenv("ATTNSTORE_CUDA_DRIVER");
  const char* const path = asked == nullptr ? "libcuda.so.1" : asked;
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    opened.why_not = "NVIDIA's driver is not here (" + std::string(error ? error : path) + ")";
    return opened;
  }
  const std::string missing = find_all(library, &opened.driver);
  if (!missing.empty()) {
    opened.why_not = std::string(path) + " has no " + missing + "; a newer driver is needed";
    return opened;
  }
  const CuResult result = opened.driver.init(0);
  if (result != kCuSuccess) {
    opened.why_not = "NVIDIA's driver does not start: " + error_text(opened.driver, result);
  }
  return opened;
}

const Opened& the_driver() {
  static const Opened opened = open_driver();
  return opened;
}

}  // namespace

const Driver& driver() {
  const Opened& opened = the_driver();
  if (!opened.why_not.empty()) throw std::runtime_error(opened.why_not);
  return opened.driver;
}

std::string why_no_driver() { return the_driver().why_not; }

void check_cuda(CuResult result, const char* call) {
  if (result == kCuSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + error_text(driver(), result));
}

}  // namespace attnstore
