// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc/cuda, compiled for the host, by name.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tests/fake_driver/streams.h"

namespace fake {

struct Function {
  std::string name;
  std::vector<std::size_t> param_bytes;
  std::uint32_t threads_max;  // of a block
  // Reads the parameters now, as a launch does.
  std::function<Body(Gpu& gpu, void** params)> bind;
};

// Null: there is none of this name.
Function* find_kernel(const std::string& name);

// The sizes of the parameters of a kernel, as PTX declares them; false if it has no such kernel.
bool read_params(const std::string& ptx, const std::string& name, std::vector<std::size_t>* found);

}  // namespace fake
