// SPDX-License-Identifier: Apache-2.0
#include "index/chunk_keys.h"

#include <cstdint>
#include <cstring>

namespace attnstore {
namespace {

void frame(std::string& to, std::string_view part) {
  const std::uint64_t size = part.size();  // x86-64: little-endian
  std::array<char, sizeof(size)> encoded{};
  std::memcpy(encoded.data(), &size, sizeof(size));
  to.append(encoded.data(), encoded.size());
  to.append(part);
}

}  // namespace

Digest chunk_key(std::string_view parent, const ChunkText& chunk, std::string& scratch,
                 const Beside& beside) {
  scratch.assign("chunk");
  frame(scratch, parent);
  frame(scratch, chunk.extra);
  frame(scratch, chunk.tokens);
  return blake3(reinterpret_cast<const std::uint8_t*>(scratch.data()), scratch.size(), beside);
}

}  // namespace attnstore
