// SPDX-License-Identifier: Apache-2.0
// The kernels of kernels.cu, loaded on one device. Both read page-locked host memory in place.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "rotate/rotation.h"

namespace attnstore {

struct CodeJob;
struct CopyJob;
struct RotateJob;

class Kernels {
 public:
  // `images`: cubins, or PTX that ends with a zero byte; the first that the driver takes is used.
  // Throws std::runtime_error that says why it takes none.
  Kernels(int device, const std::vector<std::string>& images);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Appends one job to the stream; the device's context is the thread's. The job's arrays are in
  // device memory, and unchanged until the kernel is over. At most `thread_blocks` of the device's
  // multiprocessors are taken, for as long as it runs.
  //
  // `word_bytes` is 16, 4 or 1, and divides every address and size of the job.
  void copy(CopyJob job, std::uint32_t word_bytes, std::uint32_t thread_blocks,
            CuStream stream) const;
  // Of bfloat16. `word_bytes`: on the side of blocks 16 or 2, as for copy(); cells are 8 bytes
  // aligned.
  void code(CodeJob job, bool is_decoding, std::uint32_t word_bytes, std::uint32_t thread_blocks,
            CuStream stream) const;
  // `is_wide`: its words are 16 bytes (has_wide_words).
  void rotate(RotateJob job, ElementType type, bool is_wide, std::uint32_t thread_blocks,
              CuStream stream) const;

  [[nodiscard]] CuContext context() const { return context_; }
  // Which of the images it is.
  [[nodiscard]] std::size_t image() const { return image_; }

 private:
  void find_functions();

  const CuContext context_;
  CuModule module_ = nullptr;
  std::size_t image_ = 0;
  std::array<CuFunction, 3> copies_ = {};
  std::array<std::array<CuFunction, 2>, 2> codes_ =
      {};  // [is_decoding][whether words are 16 bytes]
  std::array<std::array<CuFunction, 2>, 3> rotations_ = {};  // [type][is_wide]
};

// Throws std::runtime_error for null, which is for whoever only checks and counts.
const Kernels& loaded(const std::shared_ptr<const Kernels>& kernels);

}  // namespace attnstore
