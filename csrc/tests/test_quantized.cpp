// SPDX-License-Identifier: Apache-2.0
// The quantized codecs under the sanitizers: numbers of every pattern and layout, and damaged
// encodings, with nothing touched outside of the buffers. How near numbers are, says Python
// (tests/unit/io/test_codec_quantized.py).
#include <cmath>

#include "codec/numbers.h"
#include "codec/quantized.h"
#include "tests/check.h"
#include "tests/damage.h"

namespace {

using namespace attnstore::codec;

struct Case {
  Quantized shape;
  Bytes raw, good, decoded;
};

Quantized shape_of(Kind kind, Number number, bool is_split, std::int32_t tokens) {
  constexpr std::int32_t kBlock = 4;
  constexpr std::int32_t kHeads = 2;
  constexpr std::int32_t kDim = 8;
  constexpr std::int32_t kHalf = kBlock * kHeads * kDim;
  Quantized shape{kind, number, 2, 3, kBlock, kHeads, kDim, tokens, {}, {}};
  if (is_split) {
    shape.key = {0, kBlock * kDim, kBlock, 0, 2, 2, 2 * kBlock, 1};
    shape.value = {kHalf, kBlock * kDim, 2, 2 * kDim, 1, kDim, 0, 2};
  } else {
    shape.key = {0, kBlock * 2 * kDim, kBlock, 0, 2 * kDim, kDim, 0, 1};
    shape.value = {kDim, kBlock * 2 * kDim, kBlock, 0, 2 * kDim, kDim, 0, 1};
  }
  return shape;
}

std::size_t raw_bytes_of(const Quantized& shape) {
  return static_cast<std::size_t>(shape.units * shape.blocks * 2 * shape.block_tokens *
                                  shape.heads * shape.head_dim) *
         (shape.number == kFloat32 ? 4 : 2);
}

Case case_of(const Quantized& shape, const Bytes& raw) {
  Case made{shape, raw, Bytes(quantized_bytes(shape) + 4 * raw.size()), Bytes(raw.size(), 0xa5)};
  made.good.resize(
      quantized_encode(shape, raw.data(), raw.size(), made.good.data(), made.good.size()));
  CHECK(!made.good.empty());
  made.good.shrink_to_fit();
  CHECK(quantized_decode(shape.kind, made.good.data(), made.good.size(), made.decoded.data(),
                         made.decoded.size()));
  return made;
}

std::vector<Case> cases(std::mt19937_64& random) {
  std::vector<Case> made;
  std::normal_distribution<float> normal;
  for (const Kind kind : {kInt8, kFloat8}) {
    for (const Number number : {kBfloat16, kFloat16, kFloat32}) {
      for (const bool is_split : {false, true}) {
        for (const std::int32_t tokens : {1, 5, 12}) {
          const Quantized shape = shape_of(kind, number, is_split, tokens);
          Bytes raw(raw_bytes_of(shape));
          const std::size_t size = number == kFloat32 ? 4 : 2;
          for (std::size_t at = 0; at < raw.size(); at += size) {
            const float value = normal(random) * (random() % 50 == 0 ? 100.0F : 1.0F);
            const std::uint32_t bits = number == kFloat32   ? bits_of(value)
                                       : number == kFloat16 ? Float16::store(value)
                                                            : Bfloat16::store(value);
            std::memcpy(raw.data() + at, &bits, size);
          }
          made.push_back(case_of(shape, raw));
          made.push_back(case_of(shape, noise(raw.size(), random)));  // NaN, infinities, denormals
        }
      }
    }
  }
  return made;
}

/// All numbers of 16 bits go to float32 and back, NaN apart, and so do those of 8.
void formats_come_back() {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float half = Float16::load(static_cast<std::uint16_t>(bits));
    if (std::isfinite(half)) CHECK(Float16::store(half) == bits);
    const float brain = Bfloat16::load(static_cast<std::uint16_t>(bits));
    if (!std::isnan(brain)) CHECK(Bfloat16::store(brain) == bits);
  }
  const auto numbers = e4m3_numbers();
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    if ((byte & 0x7f) != 0x7f) CHECK(to_e4m3(numbers[byte]) == byte);
  }
}

/// Between two neighbours the nearer one is taken, of the middle the even one.
void formats_round_to_the_nearest() {
  const auto numbers = e4m3_numbers();
  for (std::uint8_t byte = 0; byte < 0x7e; ++byte) {
    const float low = numbers[byte];
    const float high = numbers[byte + 1];
    const float middle = (low + high) / 2;
    CHECK(to_e4m3(middle) == (byte % 2 == 0 ? byte : byte + 1));
    CHECK(to_e4m3(std::nextafter(middle, low)) == byte);
    CHECK(to_e4m3(std::nextafter(middle, high)) == byte + 1);
  }
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = Float16::load(bits);
    const float high = Float16::load(static_cast<std::uint16_t>(bits + 1));
    const float middle = (low + high) / 2;
    CHECK(Float16::store(middle) == (bits % 2 == 0 ? bits : bits + 1));
    CHECK(Float16::store(std::nextafter(middle, low)) == bits);
    CHECK(Float16::store(std::nextafter(middle, high)) == bits + 1);
  }
}

void too_little_room_is_said(const std::vector<Case>& all) {
  for (const Case& one : all) {
    for (const std::size_t room :
         {std::size_t{0}, std::size_t{50}, one.good.size() / 2, one.good.size() - 1}) {
      Bytes out(room);
      CHECK(quantized_encode(one.shape, one.raw.data(), one.raw.size(), out.data(), room) == 0);
    }
  }
}

void damaged(const std::vector<Case>& all, std::uint64_t num_inputs, std::mt19937_64& random) {
  constexpr std::size_t kHead = sizeof(Quantized) + 40;  // and scales
  Outcomes outcomes;
  for (std::uint64_t i = 0; i < num_inputs; ++i) {
    const Case& one = all[random() % all.size()];
    Bytes bytes = random() % 16 == 0 ? noise(random() % 300 + 1, random) : one.good;
    damage(bytes, kHead, random);
    Bytes back(one.raw.size());
    const bool is_taken =
        quantized_decode(one.shape.kind, bytes.data(), bytes.size(), back.data(), back.size());
    CHECK(!is_taken || !is_cut(bytes, one.good));
    outcomes.count(is_taken, back, one.decoded);
  }
  outcomes.print("int8, fp8");
}

/// Shapes of any numbers, which damage of single bytes seldom makes: none may be too much.
void wrong_shapes(const std::vector<Case>& all, std::uint64_t num_inputs, std::mt19937_64& random) {
  Outcomes outcomes;
  for (std::uint64_t i = 0; i < num_inputs; ++i) {
    const Case& one = all[random() % all.size()];
    Bytes bytes = one.good;
    for (std::uint64_t fields = random() % 3 + 1; fields > 0; --fields) {
      const std::uint64_t number = random();
      const auto value = static_cast<std::int32_t>(number % 3 == 0   ? number >> 32
                                                   : number % 3 == 1 ? (number >> 32) % 20
                                                                     : -((number >> 32) % 9));
      std::memcpy(bytes.data() + random() % kFields * 4, &value, 4);
    }
    Bytes back(one.raw.size());
    const bool is_taken =
        quantized_decode(one.shape.kind, bytes.data(), bytes.size(), back.data(), back.size());
    outcomes.count(is_taken, back, one.decoded);
  }
  outcomes.print("int8, fp8: wrong shapes");
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937_64 random(11);
  const std::uint64_t num_inputs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  formats_come_back();
  formats_round_to_the_nearest();
  const std::vector<Case> all = cases(random);
  too_little_room_is_said(all);
  damaged(all, num_inputs, random);
  wrong_shapes(all, num_inputs, random);
  return 0;
}
