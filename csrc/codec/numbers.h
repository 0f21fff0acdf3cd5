// SPDX-License-Identifier: Apache-2.0
// Numbers of KV as float32 and back, each rounded to the nearest, ties to even. By integers alone
// where the sizes differ, so that every processor and compiler comes to the same bits.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace attnstore::codec {

inline std::uint32_t bits_of(float number) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float number = 0;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

struct Float32 {
  using Bits = std::uint32_t;
  static constexpr float kMost = std::numeric_limits<float>::max();
  static float load(Bits bits) { return float_of(bits); }
  static Bits store(float number) { return bits_of(number); }
};

struct Bfloat16 {
  using Bits = std::uint16_t;
  static constexpr float kMost = 0x1.fep127F;
  static float load(Bits bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }
  static Bits store(float number) {
    const std::uint32_t bits = bits_of(number);
    return static_cast<Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct Float16 {
  using Bits = std::uint16_t;
  static constexpr float kMost = 65504.0F;
  static float load(Bits bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t rest = bits & 0x7fffU;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000U | (rest & 0x3ffU) << 13);
    // 2^112 moves the exponent, also that of what has none: exactly.
    return float_of(bits_of(float_of(rest << 13) * 0x1p112F) | sign);
  }
  static Bits store(float number) {
    const std::uint32_t bits = bits_of(number);
    const std::uint32_t sign = bits >> 16 & 0x8000U;
    const float size = std::fabs(number);
    if (size < 0x1p-14F) {  // in units of 2^-24, the first bits of which are its own
      return static_cast<Bits>(sign | (bits_of(size + 0.5F) - bits_of(0.5F)));
    }
    const std::uint32_t rest = bits_of(size) - (112U << 23);
    return static_cast<Bits>(sign | (rest + 0xfff + (rest >> 13 & 1)) >> 13);
  }
};

/// float8 e4m3 of a number of at most 448.
inline std::uint8_t to_e4m3(float number) {
  const std::uint32_t bits = bits_of(number);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const float size = std::fabs(number);
  const std::uint32_t rest = bits_of(size) - (120U << 23);
  const std::uint32_t normal = (rest + 0x7ffff + (rest >> 20 & 1)) >> 20;
  // In units of 2^-9: 2^14 has that as its last bit.
  const std::uint32_t small = bits_of(size + 0x1p14F) - bits_of(0x1p14F);
  return static_cast<std::uint8_t>(sign | (size < 0x1p-6F ? small : normal));
}

/// The number of each byte; 0 for the two that are NaN.
inline std::array<float, 256> e4m3_numbers() {
  std::array<float, 256> numbers{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const std::uint32_t exponent = byte >> 3 & 15;
    const auto part = static_cast<float>(byte & 7);
    const float size = exponent == 0
                           ? part * 0x1p-9F
                           : std::ldexp(1.0F + part / 8.0F, static_cast<int>(exponent) - 7);
    numbers[byte] = (byte & 0x7f) == 0x7f ? 0.0F : byte < 128 ? size : -size;
  }
  return numbers;
}

}  // namespace attnstore::codec
