// SPDX-License-Identifier: Apache-2.0
// What all that is given to a stream has in common.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/driver.h"

namespace attnstore {

// Where a kernel reads its table. Both memories are the caller's, and unchanged until the kernel is
// over.
struct StagedTable {
  std::uint64_t device;
  std::uint64_t host;  // page-locked, brought to the device first; 0: the device has it already
};

// The context of a device that PyTorch uses too. It is kept until the process ends: page-locked
// memory is locked for as long as its context lives. Throws std::runtime_error. Thread-safe.
CuContext primary_context(int device);

// The thread's current context is this one while this lives, and then what it was before.
class InContext {
 public:
  explicit InContext(CuContext context) {
    CuContext before = nullptr;
    check_cuda(driver().ctxGetCurrent(&before), "cuCtxGetCurrent");
    if (before == context) return;
    check_cuda(driver().ctxPushCurrent(context), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  ~InContext() {
    CuContext ours = nullptr;
    if (is_pushed_) static_cast<void>(driver().ctxPopCurrent(&ours));
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  bool is_pushed_ = false;
};

// Appends the copy of a table to the stream, if it is not on the device yet.
inline void bring_table(StagedTable staged, std::size_t num_bytes, CuStream stream) {
  if (staged.host == 0) return;
  check_cuda(driver().memcpyAsync(staged.device, staged.host, num_bytes, stream), "cuMemcpyAsync");
}

}  // namespace attnstore
