// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace attnstore {

// Throws std::runtime_error that says which call failed and how. What the call left as "last error"
// is taken back, so that no later call is blamed for it.
inline void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(status) + ", " +
                           cudaGetErrorString(status));
}

}  // namespace attnstore
