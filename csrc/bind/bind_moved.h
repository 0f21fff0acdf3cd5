// SPDX-License-Identifier: Apache-2.0
// How moved tokens come in from Python; for both modules.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "rotate/moved_tokens.h"

namespace attnstore {

using Moved = pybind11::array_t<std::int64_t, pybind11::array::c_style>;

inline std::vector<MovedTokens> as_moved(const Moved& array) {
  if (array.ndim() != 2 || array.shape(1) != 6) {
    throw std::invalid_argument(
        "moved must be [n, 6]: slot, first token in the chunk, tokens, block id, first token in "
        "the block, shift");
  }
  std::vector<MovedTokens> moved;
  moved.reserve(static_cast<std::size_t>(array.shape(0)));
  const std::int64_t* at = array.data();
  for (pybind11::ssize_t i = 0; i < array.shape(0); ++i, at += 6) {
    moved.push_back({at[0], at[1], at[2], at[3], at[4], at[5]});
  }
  return moved;
}

}  // namespace attnstore
