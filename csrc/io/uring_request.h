// SPDX-License-Identifier: Apache-2.0
// What goes into the io_uring device and what comes out; see attnstore_vllm/io/device.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/checksum.h"

namespace attnstore {

enum class Op : std::uint8_t { kRead, kWrite, kSync };

struct Span {
  std::byte* data;
  std::size_t num_bytes;
};

struct Seal {
  std::size_t of;  // the buffer whose checksum is taken
  std::size_t at;  // the byte of buffer 0 where it is put
};

// The buffers outlive the request. Tags in flight are distinct.
struct Request {
  std::int64_t tag = 0;
  Op op = Op::kSync;
  std::uint64_t offset = 0;
  std::vector<Span> buffers;
  std::vector<Seal> seals;
  bool checksum = false;
  std::uint64_t stride = 0;  // buffer i lies at offset + i * stride; zero: one after the other
};

struct Ended {
  std::int64_t tag = 0;
  int error = 0;  // an errno; zero if every byte was moved
  std::string text;
  bool has_checksum = false;
  Checksum checksum{};
};

}  // namespace attnstore
