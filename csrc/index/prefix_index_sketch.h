// SPDX-License-Identifier: Apache-2.0
// What the index keeps of a chunk's tokens: a hash of each eighth of it.
//
//   tokens   |  P  |  P  |  P  | < P |         P = chunk_tokens / 8, rounded up to whole blocks
//   pieces     h0    h1    h2     0   0 ...    zero where no whole piece is
//   rest                        h              of the whole blocks after the last whole piece
//
// A block has `grain` tokens; of those after a chunk's last whole block a sketch says nothing
// (index/prefix.py has why).
//
// As strings of pieces, sketches sort such that of all of them the one that shares most leading
// pieces with a given one stands beside it. Equal hashes are taken for equal tokens where a mistake
// costs a read or a chunk, and never where it would cost the answer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace attnstore {

constexpr std::size_t kPieces = 8;
constexpr std::size_t kTokenBytes = 4;

using Pieces = std::array<std::uint64_t, kPieces>;

struct Sketch {
  Pieces pieces{};
  std::uint64_t rest = 0;
  std::uint32_t whole_tokens = 0;  // in whole blocks
  std::uint32_t num_pieces = 0;
};

// The number of leading pieces that both have.
std::uint32_t shared_pieces(const Pieces& a, const Pieces& b);

// Hashes with SipHash-1-3, since who knows the seed could make two prompts look alike.
class Sketcher {
 public:
  // Throws std::invalid_argument without tokens in a chunk or a block.
  Sketcher(std::uint32_t chunk_tokens, std::uint64_t seed, std::uint32_t grain);

  // `tokens` has num_tokens * 4 bytes. Throws std::invalid_argument beyond a chunk.
  Sketch sketch(const std::uint8_t* tokens, std::uint32_t num_tokens) const;

  // The rest of the first `whole_tokens` of these tokens, which are whole blocks.
  std::uint64_t rest(const std::uint8_t* tokens, std::uint32_t whole_tokens) const;

  std::uint64_t hash(const std::uint8_t* data, std::size_t num_bytes) const;
  std::uint32_t chunk_tokens() const { return chunk_tokens_; }
  std::uint32_t piece_tokens() const { return piece_tokens_; }

  // Those in whole blocks, of so many.
  std::uint32_t whole(std::uint32_t num_tokens) const { return num_tokens / grain_ * grain_; }

 private:
  const std::uint32_t chunk_tokens_;
  const std::uint32_t grain_;
  const std::uint32_t piece_tokens_;
  const std::uint64_t key0_;
  const std::uint64_t key1_;
};

// A bijection in which each bit of the result depends on all of `x`.
std::uint64_t mix64(std::uint64_t x);

}  // namespace attnstore
