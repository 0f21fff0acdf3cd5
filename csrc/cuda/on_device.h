// SPDX-License-Identifier: Apache-2.0
// What all that is given to a stream has in common.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/cuda_error.h"

namespace attnstore {

// Where a kernel reads its table. Both memories are the caller's, and unchanged until the kernel is
// over.
struct StagedTable {
  std::uint64_t device;
  std::uint64_t host;  // page-locked, brought to the device first; 0: the device has it already
};

// The thread's current device is `device` while this lives. PyTorch has a current device of its
// own, which must be what it was when we return.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    is_changed_ = true;
  }
  ~OnDevice() {
    if (is_changed_) static_cast<void>(cudaSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

// Appends the copy of a table to the stream, if it is not on the device yet.
inline void bring_table(StagedTable staged, std::size_t num_bytes, cudaStream_t stream) {
  if (staged.host == 0) return;
  check_cuda(cudaMemcpyAsync(reinterpret_cast<void*>(staged.device),
                             reinterpret_cast<const void*>(staged.host), num_bytes,
                             cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
}

}  // namespace attnstore
