// SPDX-License-Identifier: Apache-2.0
// The rotation of K by a difference of positions. This arithmetic has one source: rotate_body.h
// compiles it for several CPUs, and nvcc for the device (cuda/rotate_words.h).
//
// RoPE at position p turns the pair (x1, x2) of frequency theta by p * theta. Turned once more by
// (q - p) * theta it is the pair at position q:
//
//   y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin
//
// in float32; a constant scale of the pair (YaRN's) goes through it unchanged. The result is
// rounded once, to the nearest, ties to even. Whether a product and a sum are one instruction is
// the compiler's choice.
#pragma once

#include <cstdint>

#include "rotate/page_content.h"

namespace attnstore {

// Which dims are a pair: i and i + rotary_dim / 2 (NeoX), or 2 i and 2 i + 1 (GPT-J).
enum class Pairing : std::uint8_t { kNeox, kGptj };

struct DimPair {
  std::int64_t first;
  std::int64_t second;
};

ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE DimPair pair_dims(Pairing pairing,
                                                                std::int64_t num_pairs,
                                                                std::int64_t pair) {
  if (pairing == Pairing::kNeox) return {pair, pair + num_pairs};
  return {2 * pair, 2 * pair + 1};
}

ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float float_of_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value = 0;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::uint32_t bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

enum class ElementType : std::uint8_t { kBfloat16, kFloat16, kFloat32 };

constexpr std::uint32_t element_bytes(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

// Element types, by what is stored. No branches: loops over them become vectors.

struct Float32 {
  using Bits = std::uint32_t;
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float widen(Bits bits) {
    return float_of_bits(bits);
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE Bits narrow(float value) {
    return bits_of_float(value);
  }
};

struct Bfloat16 {
  using Bits = std::uint16_t;
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float widen(Bits bits) {
    return float_of_bits(static_cast<std::uint32_t>(bits) << 16);
  }
  // The high half is what is stored.
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::uint32_t rounded(float value) {
    const std::uint32_t bits = bits_of_float(value);
    return value != value ? bits | 0x00400000U : bits + 0x7FFFU + ((bits >> 16) & 1U);
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE Bits narrow(float value) {
    return static_cast<Bits>(rounded(value) >> 16);
  }
};

struct Float16 {
  using Bits = std::uint16_t;
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float widen(Bits bits) {
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    const std::uint32_t rest = bits & 0x7FFFU;
    const std::uint32_t exponent = rest & 0x7C00U;
    const std::uint32_t normal = (rest << 13) + ((127U - 15U) << 23);
    const std::uint32_t special = (rest << 13) | 0x7F800000U;  // infinite, or not a number
    const std::uint32_t small =  // without float32's own subnormals, which a thread may have off
        bits_of_float(static_cast<float>(static_cast<std::int32_t>(rest)) * 0x1p-24F);
    const std::uint32_t finite = exponent == 0 ? small : normal;
    return float_of_bits(sign | (exponent == 0x7C00U ? special : finite));
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE Bits narrow(float value) {
    const std::uint32_t all = bits_of_float(value);
    const std::uint32_t sign = (all >> 16) & 0x8000U;
    const std::uint32_t bits = all & 0x7FFFFFFFU;
    // Below 2^-14 half has steps of 2^-24, which are those of float32 from 0.5 on.
    const std::uint32_t small = bits_of_float(float_of_bits(bits) + 0.5F) - 0x3F000000U;
    const std::uint32_t normal = (bits - (112U << 23) + 0x0FFFU + ((bits >> 13) & 1U)) >> 13;
    const std::uint32_t special = bits > 0x7F800000U ? 0x7E00U : 0x7C00U;
    const std::uint32_t finite = bits < (113U << 23) ? small : normal;
    // From 65520 on the nearest half is infinite.
    return static_cast<Bits>(sign | (bits >= 0x477FF000U ? special : finite));
  }
};

// Two elements of 16 bits in one number, by half: for loops that are to be vectors of one width.

template <typename Element>
struct Halves {
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float low(std::uint32_t word) {
    return Element::widen(static_cast<std::uint16_t>(word));
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float high(std::uint32_t word) {
    return Element::widen(static_cast<std::uint16_t>(word >> 16));
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::uint32_t join(float low, float high) {
    return Element::narrow(low) | static_cast<std::uint32_t>(Element::narrow(high)) << 16;
  }
};

template <>
struct Halves<Bfloat16> {
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float low(std::uint32_t word) {
    return float_of_bits(word << 16);
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE float high(std::uint32_t word) {
    return float_of_bits(word & 0xFFFF0000U);
  }
  static ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE std::uint32_t join(float low, float high) {
    return Bfloat16::rounded(low) >> 16 | (Bfloat16::rounded(high) & 0xFFFF0000U);
  }
};

template <typename Element>
ATTNSTORE_HOST_DEVICE ATTNSTORE_ALWAYS_INLINE void rotate_pair(typename Element::Bits x1,
                                                               typename Element::Bits x2,
                                                               float cosine, float sine,
                                                               typename Element::Bits* y1,
                                                               typename Element::Bits* y2) {
  const float first = Element::widen(x1);
  const float second = Element::widen(x2);
  *y1 = Element::narrow(first * cosine - second * sine);
  *y2 = Element::narrow(second * cosine + first * sine);
}

}  // namespace attnstore
