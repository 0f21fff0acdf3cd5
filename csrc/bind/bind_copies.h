// SPDX-License-Identifier: Apache-2.0
// How pages come in from Python; for both modules.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "copy/page_map.h"

namespace attnstore {

using Copies = pybind11::array_t<std::int64_t, pybind11::array::c_style>;
using Rows = Copies;

inline std::vector<PageCopy> as_copies(const Copies& array) {
  if (array.ndim() != 2 || array.shape(1) != 3) {
    throw std::invalid_argument("copies must be [n, 3]: slot, block in the chunk, block id");
  }
  std::vector<PageCopy> copies;
  copies.reserve(static_cast<std::size_t>(array.shape(0)));
  const std::int64_t* at = array.data();
  for (pybind11::ssize_t i = 0; i < array.shape(0); ++i, at += 3) {
    copies.push_back({at[0], at[1], at[2]});
  }
  return copies;
}

inline std::vector<std::int64_t> as_rows(const Rows& array) {
  if (array.ndim() != 1) throw std::invalid_argument("rows must be [n]");
  return {array.data(), array.data() + array.shape(0)};
}

}  // namespace attnstore
