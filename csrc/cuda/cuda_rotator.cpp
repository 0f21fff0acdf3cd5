// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_rotator.h"

#include <utility>

namespace attnstore {

CudaPageRotator::CudaPageRotator(std::shared_ptr<const Kernels> kernels, PageShape pages,
                                 RotationShape rotation, std::uint64_t arrays)
    : kernels_(std::move(kernels)),
      pages_(std::move(pages)),
      rotation_(std::move(rotation)),
      arrays_(reinterpret_cast<const std::uint64_t*>(arrays)) {
  check_shape(pages_);
  check_sizes(pages_);
  check_rotation(pages_, rotation_);
  is_wide_ = has_wide_words(pages_, rotation_);
}

void CudaPageRotator::check(std::vector<MovedTokens> moved, LayerRange layers) const {
  sort_by_place(&moved);
  check_moved(pages_, rotation_, moved, layers);
}

MoveTable CudaPageRotator::table(const std::vector<MovedTokens>& moved) const {
  check(moved, {0, 0});
  return make_move_table(rotation_, moved);
}

void CudaPageRotator::load(const MoveTable& table, LayerRange layers, StagedTable staged,
                           std::uint32_t thread_blocks, CuStream stream) const {
  check_copies(pages_, {}, layers);
  if (table.num_tokens == 0 || layers.first == layers.stop) return;
  PageMap map = pages_.map();
  map.layer_bases = arrays_;
  map.run_offsets = arrays_ + pages_.layer_bases.size();
  const auto jobs = make_rotate_jobs(map, rotation_, is_wide_, table, staged.device, layers);
  const InContext in_context(loaded(kernels_).context());
  bring_table(staged, table.words.size() * sizeof(std::int64_t), stream);
  for (const RotateJob& job : jobs) {
    kernels_->rotate(job, rotation_.type, is_wide_, thread_blocks, stream);
  }
}

}  // namespace attnstore
