// SPDX-License-Identifier: Apache-2.0
// The quantized codecs: a byte a number, so what comes back is approximate. K has a scale for each
// channel (head and dim) of a chunk, V one for each token and head; numbers far outside of their
// group, infinities and NaN among them, are outliers and come back exactly. Tokens behind the
// chunk's last one come back as zeros: nobody has written them.
//
// What is encoded says itself where its numbers belong, so that it is decoded without the model. It
// is (little-endian):
//
//   kFields numbers of 4 bytes, in the order of `Quantized`
//   for each unit (a rank's layer), for K and then V, of T tokens and C channels:
//     scales     2 bytes each, as the upper half of a float32: C of K; T * heads of V
//     outliers   4 bytes: how many; of each 4 bytes, its place t * C + c, and its bits as they were
//     numbers    1 byte each, T * C, token by token; 0 where an outlier is
//
// An int8 number is the byte times its scale; an fp8 one is the byte as float8 e4m3 times its
// scale. -128 and NaN are not used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace attnstore::codec {

constexpr std::size_t kSideFields = 8;

/// Where K or V lies in a page, in elements (transfer/page_content.py).
struct Side {
  std::int32_t base, head_step, token_group, token_outer, token_inner, dim_group, dim_outer,
      dim_inner;
};

enum Kind : std::int32_t { kInt8 = 1, kFloat8 = 2 };
enum Number : std::int32_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

/// How a payload lies: units, each of so many blocks of one page.
struct Quantized {
  std::int32_t kind, number;
  std::int32_t units, blocks, block_tokens, heads, head_dim;
  std::int32_t tokens;  // that the chunk has, from the first on
  Side key, value;
};
constexpr std::size_t kFields = 8 + 2 * kSideFields;
static_assert(sizeof(Quantized) == kFields * sizeof(std::int32_t));

/// Whether a payload of so many bytes can lie so: all places are inside, and what is left over is
/// less than a page of 4096 bytes.
bool is_valid(const Quantized& shape, std::size_t raw_bytes);

/// Bytes of an encoding without outliers. `shape` is valid.
std::size_t quantized_bytes(const Quantized& shape);

/// Encode `raw`. Returns the bytes written, 0 if they are more than `capacity`, or if `shape` is
/// not one of so many bytes.
std::size_t quantized_encode(const Quantized& shape, const std::uint8_t* raw, std::size_t raw_bytes,
                             std::uint8_t* out, std::size_t capacity);

/// Decode exactly `raw_bytes`, all of which are written to. False if `in` is not an encoding of so
/// many bytes, of this kind; `out` may have been written to then. Whatever `in` has, nothing
/// outside of both is touched.
bool quantized_decode(std::int32_t kind, const std::uint8_t* in, std::size_t in_bytes,
                      std::uint8_t* out, std::size_t raw_bytes);

}  // namespace attnstore::codec
