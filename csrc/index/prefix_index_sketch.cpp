// SPDX-License-Identifier: Apache-2.0
#include "index/prefix_index_sketch.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace attnstore {

namespace {

std::uint64_t rotate(std::uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

struct SipState {
  std::uint64_t a, b, c, d;

  void round() {
    a += b;
    b = rotate(b, 13) ^ a;
    a = rotate(a, 32);
    c += d;
    d = rotate(d, 16) ^ c;
    a += d;
    d = rotate(d, 21) ^ a;
    c += b;
    b = rotate(b, 17) ^ c;
    c = rotate(c, 32);
  }

  void absorb(std::uint64_t word) {
    d ^= word;
    round();
    a ^= word;
  }
};

std::uint32_t checked(std::uint32_t num_tokens) {
  if (num_tokens == 0) throw std::invalid_argument("a chunk or a block has no tokens");
  return num_tokens;
}

std::uint32_t round_up(std::uint32_t number, std::uint32_t to) {
  return (number + to - 1) / to * to;
}

}  // namespace

std::uint64_t mix64(std::uint64_t x) {  // the finaliser of MurmurHash3
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

std::uint32_t shared_pieces(const Pieces& a, const Pieces& b) {
  std::uint32_t shared = 0;
  while (shared < kPieces && a[shared] == b[shared] && a[shared] != 0) ++shared;
  return shared;
}

Sketcher::Sketcher(std::uint32_t chunk_tokens, std::uint64_t seed, std::uint32_t grain)
    : chunk_tokens_(checked(chunk_tokens)),
      grain_(checked(grain)),
      piece_tokens_(round_up((chunk_tokens - 1) / kPieces + 1, grain)),
      key0_(mix64(seed + 1)),
      key1_(mix64(seed + 0x9e3779b97f4a7c15ULL)) {}

std::uint64_t Sketcher::hash(const std::uint8_t* data, std::size_t num_bytes) const {
  SipState state{key0_ ^ 0x736f6d6570736575ULL, key1_ ^ 0x646f72616e646f6dULL,
                 key0_ ^ 0x6c7967656e657261ULL, key1_ ^ 0x7465646279746573ULL};
  std::uint64_t word = 0;
  std::size_t at = 0;
  for (; at + 8 <= num_bytes; at += 8) {
    std::memcpy(&word, data + at, 8);
    state.absorb(word);
  }
  word = static_cast<std::uint64_t>(num_bytes) << 56;
  for (std::size_t i = 0; at + i < num_bytes; ++i) {
    word |= static_cast<std::uint64_t>(data[at + i]) << (8 * i);
  }
  state.absorb(word);
  state.c ^= 0xff;
  for (int i = 0; i < 3; ++i) state.round();
  return state.a ^ state.b ^ state.c ^ state.d;
}

std::uint64_t Sketcher::rest(const std::uint8_t* tokens, std::uint32_t whole_tokens) const {
  const std::size_t beyond = whole_tokens % piece_tokens_;
  if (beyond == 0) return 0;
  return hash(tokens + (whole_tokens - beyond) * kTokenBytes, beyond * kTokenBytes);
}

Sketch Sketcher::sketch(const std::uint8_t* tokens, std::uint32_t num_tokens) const {
  if (num_tokens > chunk_tokens_) {
    throw std::invalid_argument(std::to_string(num_tokens) + " tokens, but a chunk has " +
                                std::to_string(chunk_tokens_));
  }
  Sketch made;
  made.whole_tokens = whole(num_tokens);
  made.num_pieces = num_tokens / piece_tokens_;
  const std::size_t piece_bytes = piece_tokens_ * kTokenBytes;
  for (std::uint32_t i = 0; i < made.num_pieces; ++i) {
    const std::uint64_t hashed = hash(tokens + i * piece_bytes, piece_bytes);
    made.pieces[i] = hashed == 0 ? 1 : hashed;  // zero says that there is none
  }
  made.rest = rest(tokens, made.whole_tokens);
  return made;
}

}  // namespace attnstore
