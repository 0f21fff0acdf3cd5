// SPDX-License-Identifier: Apache-2.0
// Fills single tokens of blocks from slots, on one device: K turned by the difference of the
// positions (../rotation.h), V as it is. What page_rotator.h is on the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/on_device.h"
#include "cuda/rotate_jobs.h"

namespace attnstore {

class CudaPageRotator {
 public:
  // `pages` holds addresses as the device sees them. `arrays` is the address of its layer bases
  // and, behind them, its run offsets in the device's memory; they are the caller's and outlive
  // this. Throws std::invalid_argument if the shapes contradict themselves or each other, or are
  // too large (check_sizes). Calls nothing of CUDA.
  CudaPageRotator(std::shared_ptr<const Kernels> kernels, PageShape pages, RotationShape rotation,
                  std::uint64_t arrays);

  // Throws std::out_of_range (check_moved). Calls nothing of CUDA.
  void check(std::vector<MovedTokens> moved, LayerRange layers) const;

  // The table of these tokens, which are checked as above. Calls nothing of CUDA.
  [[nodiscard]] MoveTable table(const std::vector<MovedTokens>& moved) const;

  // Fills these layers of the places of a table that this has made, by a kernel on at most
  // `thread_blocks` multiprocessors; other tokens of the blocks are not touched. Appended to the
  // stream, and over when it comes past it. `staged` holds the words of the table. Throws
  // std::out_of_range for a layer that does not exist, before it calls anything of CUDA.
  void load(const MoveTable& table, LayerRange layers, StagedTable staged,
            std::uint32_t thread_blocks, CuStream stream) const;

  // Whether K and V are read and written 16 bytes at a time, and not by element.
  [[nodiscard]] bool is_wide() const { return is_wide_; }

 private:
  const std::shared_ptr<const Kernels> kernels_;
  const PageShape pages_;
  const RotationShape rotation_;
  const std::uint64_t* const arrays_;
  bool is_wide_;
};

}  // namespace attnstore
