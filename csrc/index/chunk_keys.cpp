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

Digest chunk_key(std::string_view parent, const ChunkText& chunk, std::string& scratch) {
  scratch.assign("chunk");
  frame(scratch, parent);
  frame(scratch, chunk.extra);
  frame(scratch, chunk.tokens);
  return blake3(reinterpret_cast<const std::uint8_t*>(scratch.data()), scratch.size());
}

std::vector<Digest> chain_keys(std::string_view parent, const std::vector<ChunkText>& chunks) {
  std::vector<Digest> keys;
  keys.reserve(chunks.size());
  std::string scratch;
  for (const ChunkText& chunk : chunks) {
    keys.push_back(chunk_key(parent, chunk, scratch));
    const Digest& last = keys.back();
    parent = {reinterpret_cast<const char*>(last.data()), last.size()};
  }
  return keys;
}

}  // namespace attnstore
