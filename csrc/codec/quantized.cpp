// SPDX-License-Identifier: Apache-2.0
// It is long since each format is packed and unpacked by one set of rules.
#include "codec/quantized.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/numbers.h"

namespace attnstore::codec {

namespace {

constexpr std::int64_t kCountMax = 1 << 20;  // of each number of a shape: products fit 64 bits
constexpr std::size_t kPadding = 4096;
constexpr float kFar = 8.0F;           // outliers are so many times as large as their group's mean
constexpr float kLeast = 0x1p-100F;    // smaller scales have no inverse
constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: what is added to it is rounded to an integer

/// Of K or V of one unit: T tokens of C channels.
struct Part {
  std::size_t tokens, heads, head_dim;
  bool by_channel;  // K
  std::size_t channels() const { return heads * head_dim; }
  std::size_t count() const { return tokens * channels(); }
  std::size_t groups() const { return by_channel ? channels() : tokens * heads; }
};

Part part_of(const Quantized& shape, bool by_channel) {
  return {static_cast<std::size_t>(shape.tokens), static_cast<std::size_t>(shape.heads),
          static_cast<std::size_t>(shape.head_dim), by_channel};
}

std::size_t number_bytes(const Quantized& shape) { return shape.number == kFloat32 ? 4 : 2; }

std::size_t page_elements(const Quantized& shape) {
  return 2 * static_cast<std::size_t>(shape.block_tokens) * static_cast<std::size_t>(shape.heads) *
         static_cast<std::size_t>(shape.head_dim);
}

/// Whether all places of a side are in its page. They rise or fall with each of five counters.
bool is_inside(const Side& side, const Quantized& shape) {
  if (side.token_group < 1 || side.dim_group < 1) return false;
  std::int64_t least = side.base;
  std::int64_t most = side.base;
  const auto add = [&](std::int64_t last, std::int64_t step) {
    (step < 0 ? least : most) += last * step;
  };
  add(shape.heads - 1, side.head_step);
  add((shape.block_tokens - 1) / side.token_group, side.token_outer);
  add(std::min(shape.block_tokens, side.token_group) - 1, side.token_inner);
  add((shape.head_dim - 1) / side.dim_group, side.dim_outer);
  add(std::min(shape.head_dim, side.dim_group) - 1, side.dim_inner);
  return least >= 0 && most < static_cast<std::int64_t>(page_elements(shape));
}

std::size_t token_place(const Side& side, std::size_t token) {
  const auto group = static_cast<std::size_t>(side.token_group);
  return static_cast<std::size_t>(static_cast<std::int64_t>(token / group) * side.token_outer +
                                  static_cast<std::int64_t>(token % group) * side.token_inner);
}

/// Places of a head's dims from that of the first.
std::vector<std::size_t> dim_places(const Side& side, std::size_t head_dim) {
  const auto group = static_cast<std::size_t>(side.dim_group);
  std::vector<std::size_t> places(head_dim);
  for (std::size_t dim = 0; dim < head_dim; ++dim) {
    places[dim] = static_cast<std::size_t>(static_cast<std::int64_t>(dim / group) * side.dim_outer +
                                           static_cast<std::int64_t>(dim % group) * side.dim_inner);
  }
  return places;
}

/// Calls `row(place, at)` for each token and head: where its dims lie in the unit, in elements, and
/// where they stand among the part's numbers.
template <class Row>
void each_row(const Quantized& shape, const Side& side, const Part& part, Row row) {
  const auto block_tokens = static_cast<std::size_t>(shape.block_tokens);
  for (std::size_t token = 0; token < part.tokens; ++token) {
    const std::size_t place = token / block_tokens * page_elements(shape) +
                              static_cast<std::size_t>(side.base) +
                              token_place(side, token % block_tokens);
    for (std::size_t head = 0; head < part.heads; ++head) {
      const auto step = static_cast<std::size_t>(static_cast<std::int64_t>(head) * side.head_step);
      row(place + step, (token * part.heads + head) * part.head_dim);
    }
  }
}

/// Where a part's number `at` lies in the unit, in elements.
std::size_t place_of(const Quantized& shape, const Side& side, const Part& part,
                     const std::vector<std::size_t>& dims, std::size_t at) {
  const auto block_tokens = static_cast<std::size_t>(shape.block_tokens);
  const std::size_t token = at / part.channels();
  const auto head = static_cast<std::int64_t>(at % part.channels() / part.head_dim);
  return token / block_tokens * page_elements(shape) + static_cast<std::size_t>(side.base) +
         token_place(side, token % block_tokens) + static_cast<std::size_t>(head * side.head_step) +
         dims[at % part.head_dim];
}

template <class Format>
typename Format::Bits get(const std::uint8_t* at) {
  typename Format::Bits bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

/// Memory that coding a part takes beside input and output.
struct Work {
  std::vector<float> numbers;
  std::vector<float> sums, most, limits, scales, inverses;
  std::vector<std::uint32_t> outliers;
};

Work& work() {
  thread_local Work mine;
  return mine;
}

template <class Format>
void gather(const Quantized& shape, const Side& side, const Part& part, const std::uint8_t* unit,
            float* out) {
  constexpr std::size_t kSize = sizeof(typename Format::Bits);
  const bool is_plain = side.dim_inner == 1 && side.dim_group >= shape.head_dim;
  const std::vector<std::size_t> places = dim_places(side, part.head_dim);
  each_row(shape, side, part, [&](std::size_t place, std::size_t at) {
    const std::uint8_t* const from = unit + place * kSize;
    float* const to = out + at;
    if (is_plain) {
      for (std::size_t i = 0; i < part.head_dim; ++i) {
        to[i] = Format::load(get<Format>(from + i * kSize));
      }
    } else {
      for (std::size_t i = 0; i < part.head_dim; ++i) {
        to[i] = Format::load(get<Format>(from + places[i] * kSize));
      }
    }
  });
}

template <class Format>
void scatter(const Quantized& shape, const Side& side, const Part& part, const float* in,
             std::uint8_t* unit) {
  constexpr std::size_t kSize = sizeof(typename Format::Bits);
  const bool is_plain = side.dim_inner == 1 && side.dim_group >= shape.head_dim;
  const std::vector<std::size_t> places = dim_places(side, part.head_dim);
  each_row(shape, side, part, [&](std::size_t place, std::size_t at) {
    std::uint8_t* const to = unit + place * kSize;
    const float* const from = in + at;
    const auto put = [&](std::size_t i, std::size_t dim) {
      // Half a step over the largest number may be more than the format has.
      const float kept = std::min(std::max(from[i], -Format::kMost), Format::kMost);
      const typename Format::Bits bits = Format::store(kept);
      std::memcpy(to + dim * kSize, &bits, kSize);
    };
    if (is_plain) {
      for (std::size_t i = 0; i < part.head_dim; ++i) put(i, i);
    } else {
      for (std::size_t i = 0; i < part.head_dim; ++i) put(i, places[i]);
    }
  });
}

/// The size of a number; 0 of those that are not finite.
float size_of(float number) {
  const float size = std::fabs(number);
  return size <= Float32::kMost ? size : 0.0F;
}

/// Calls `run(group, step, numbers, count)` for runs of numbers: number i is of group + i * step.
template <class Run>
void each_run(const Part& part, const float* numbers, Run run) {
  const std::size_t length = part.by_channel ? part.channels() : part.head_dim;
  for (std::size_t at = 0; at < part.count(); at += length) {
    run(part.by_channel ? 0 : at / length, at, numbers + at, length);
  }
}

/// What is farther out than `limits` is an outlier; `most` is the largest of the others.
void measure(const Part& part, const float* numbers, Work& w) {
  const std::size_t groups = part.groups();
  const std::size_t members = part.count() / std::max<std::size_t>(1, groups);
  w.sums.assign(groups, 0.0F);
  w.most.assign(groups, 0.0F);
  w.limits.resize(groups);
  each_run(part, numbers, [&](std::size_t group, std::size_t, const float* run, std::size_t n) {
    if (part.by_channel) {
      for (std::size_t i = 0; i < n; ++i) w.sums[i] += size_of(run[i]);
    } else {
      float sum = 0.0F;
      for (std::size_t i = 0; i < n; ++i) sum += size_of(run[i]);
      w.sums[group] = sum;
    }
  });
  for (std::size_t i = 0; i < groups; ++i) {
    w.limits[i] = kFar * (w.sums[i] / static_cast<float>(members));
  }
  each_run(part, numbers, [&](std::size_t group, std::size_t, const float* run, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t of = part.by_channel ? i : group;
      const float size = size_of(run[i]);
      w.most[of] = std::max(w.most[of], size <= w.limits[of] ? size : 0.0F);
    }
  });
}

template <class Code>
void put_codes(const Part& part, const float* numbers, const Work& w, std::uint8_t* out,
               Code code) {
  each_run(part, numbers, [&](std::size_t group, std::size_t at, const float* run, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t of = part.by_channel ? i : group;
      const float size = size_of(run[i]);
      const float scaled = run[i] * w.inverses[of];
      out[at + i] = size <= w.limits[of] && size > 0.0F ? code(scaled) : std::uint8_t{0};
    }
  });
}

std::uint8_t to_int8(float scaled) {
  const float kept = std::min(std::max(scaled, -127.0F), 127.0F);
  return static_cast<std::uint8_t>(static_cast<std::int8_t>((kept + kMagic) - kMagic));
}

std::uint8_t to_float8(float scaled) {
  return to_e4m3(std::min(std::max(scaled, -448.0F), 448.0F));
}

/// Encode a part. Returns the end, or null where there is too little room.
template <class Format>
std::uint8_t* encode_part(const Quantized& shape, const Side& side, const Part& part,
                          const std::uint8_t* unit, std::uint8_t* out, const std::uint8_t* end) {
  Work& w = work();
  w.numbers.resize(part.count());
  gather<Format>(shape, side, part, unit, w.numbers.data());
  measure(part, w.numbers.data(), w);
  const std::size_t groups = part.groups();
  const float most = shape.kind == kInt8 ? 127.0F : 448.0F;
  w.inverses.resize(groups);
  std::size_t need = 2 * groups + 4 + part.count();
  if (static_cast<std::size_t>(end - out) < need) return nullptr;
  for (std::size_t i = 0; i < groups; ++i) {
    const bool is_zero = w.most[i] == 0.0F;
    // To the nearest: the largest number loses a quarter of a step at most, and what is encoded
    // again keeps its scale. Rounded up, scales would grow each time.
    const std::uint16_t bits = is_zero ? 0 : Bfloat16::store(std::max(w.most[i] / most, kLeast));
    w.inverses[i] = is_zero ? 0.0F : 1.0F / float_of(static_cast<std::uint32_t>(bits) << 16);
    std::memcpy(out + 2 * i, &bits, 2);
  }
  out += 2 * groups;
  w.outliers.clear();
  each_run(part, w.numbers.data(),
           [&](std::size_t group, std::size_t at, const float* run, std::size_t n) {
             for (std::size_t i = 0; i < n; ++i) {
               const float limit = w.limits[part.by_channel ? i : group];
               if (!(std::fabs(run[i]) <= std::min(limit, Float32::kMost))) {
                 w.outliers.push_back(static_cast<std::uint32_t>(at + i));
               }
             }
           });
  constexpr std::size_t kSize = sizeof(typename Format::Bits);
  need = 4 + w.outliers.size() * (4 + kSize) + part.count();
  if (static_cast<std::size_t>(end - out) < need) return nullptr;
  const auto num_outliers = static_cast<std::uint32_t>(w.outliers.size());
  std::memcpy(out, &num_outliers, 4);
  out += 4;
  const std::vector<std::size_t> dims = dim_places(side, part.head_dim);
  for (const std::uint32_t at : w.outliers) {
    std::memcpy(out, &at, 4);
    std::memcpy(out + 4, unit + place_of(shape, side, part, dims, at) * kSize, kSize);
    out += 4 + kSize;
  }
  if (shape.kind == kInt8) {
    put_codes(part, w.numbers.data(), w, out, to_int8);
  } else {
    put_codes(part, w.numbers.data(), w, out, to_float8);
  }
  return out + part.count();
}

/// What is left of an encoding that is read.
struct Input {
  const std::uint8_t* at;
  std::size_t left;

  /// The next bytes, or null if there are not so many.
  const std::uint8_t* take(std::size_t size) {
    if (size > left) return nullptr;
    const std::uint8_t* const taken = at;
    at += size;
    left -= size;
    return taken;
  }
};

/// The outliers' places are inside, each behind the one before.
template <class Format>
bool take_outliers(Input& in, const Part& part, const std::uint8_t*& list, std::uint32_t& count) {
  const std::uint8_t* const head = in.take(4);
  if (head == nullptr) return false;
  std::memcpy(&count, head, 4);
  if (count > part.count()) return false;
  constexpr std::size_t kSize = 4 + sizeof(typename Format::Bits);
  list = in.take(count * kSize);
  if (list == nullptr) return false;
  std::uint64_t least = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint32_t at = 0;
    std::memcpy(&at, list + i * kSize, 4);
    if (at < least || at >= part.count()) return false;
    least = std::uint64_t{at} + 1;
  }
  return true;
}

const std::array<float, 256>& numbers_of(std::int32_t kind) {
  static const std::array<float, 256> float8 = e4m3_numbers();
  static const std::array<float, 256> int8 = [] {
    std::array<float, 256> numbers{};
    for (std::size_t byte = 0; byte < 256; ++byte) {
      numbers[byte] = static_cast<float>(static_cast<std::int8_t>(byte));
    }
    return numbers;
  }();
  return kind == kInt8 ? int8 : float8;
}

/// Whether none of the bytes is one that no encoder writes.
bool are_codes(const std::uint8_t* codes, std::size_t count, std::int32_t kind) {
  const std::uint8_t mask = kind == kInt8 ? 0xff : 0x7f;
  const std::uint8_t unused = kind == kInt8 ? 0x80 : 0x7f;
  std::uint8_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    found |= static_cast<std::uint8_t>((codes[i] & mask) == unused);
  }
  return found == 0;
}

template <class Format>
bool decode_part(const Quantized& shape, const Side& side, const Part& part, Input& in,
                 std::uint8_t* unit) {
  Work& w = work();
  const std::size_t groups = part.groups();
  const std::uint8_t* const scales = in.take(2 * groups);
  const std::uint8_t* list = nullptr;
  std::uint32_t num_outliers = 0;
  if (scales == nullptr || !take_outliers<Format>(in, part, list, num_outliers)) return false;
  const std::uint8_t* const codes = in.take(part.count());
  if (codes == nullptr || !are_codes(codes, part.count(), shape.kind)) return false;
  w.scales.resize(groups);
  for (std::size_t i = 0; i < groups; ++i) {
    w.scales[i] = Bfloat16::load(get<Bfloat16>(scales + 2 * i));
    if (!(w.scales[i] >= 0.0F && w.scales[i] <= Float32::kMost)) return false;
  }
  w.numbers.resize(part.count());
  const std::array<float, 256>& numbers = numbers_of(shape.kind);
  each_run(part, w.numbers.data(),
           [&](std::size_t group, std::size_t at, const float*, std::size_t n) {
             for (std::size_t i = 0; i < n; ++i) {
               const std::size_t of = part.by_channel ? i : group;
               w.numbers[at + i] = numbers[codes[at + i]] * w.scales[of];
             }
           });
  scatter<Format>(shape, side, part, w.numbers.data(), unit);
  constexpr std::size_t kSize = sizeof(typename Format::Bits);
  if (num_outliers == 0) return true;
  const std::vector<std::size_t> dims = dim_places(side, part.head_dim);
  for (std::uint32_t i = 0; i < num_outliers; ++i) {
    const std::uint8_t* const outlier = list + i * (4 + kSize);
    std::uint32_t at = 0;
    std::memcpy(&at, outlier, 4);
    std::memcpy(unit + place_of(shape, side, part, dims, at) * kSize, outlier + 4, kSize);
  }
  return true;
}

template <class Format>
std::size_t encode_all(const Quantized& shape, const std::uint8_t* raw, std::uint8_t* out,
                       std::size_t capacity) {
  if (capacity < sizeof shape) return 0;
  std::memcpy(out, &shape, sizeof shape);
  std::uint8_t* to = out + sizeof shape;
  const std::size_t unit_bytes =
      static_cast<std::size_t>(shape.blocks) * page_elements(shape) * sizeof(typename Format::Bits);
  for (std::int32_t unit = 0; unit < shape.units; ++unit) {
    const std::uint8_t* const from = raw + static_cast<std::size_t>(unit) * unit_bytes;
    for (const bool is_key : {true, false}) {
      const Side& side = is_key ? shape.key : shape.value;
      to = encode_part<Format>(shape, side, part_of(shape, is_key), from, to, out + capacity);
      if (to == nullptr) return 0;
    }
  }
  return static_cast<std::size_t>(to - out);
}

template <class Format>
bool decode_all(const Quantized& shape, Input in, std::uint8_t* out) {
  const std::size_t unit_bytes =
      static_cast<std::size_t>(shape.blocks) * page_elements(shape) * sizeof(typename Format::Bits);
  for (std::int32_t unit = 0; unit < shape.units; ++unit) {
    std::uint8_t* const to = out + static_cast<std::size_t>(unit) * unit_bytes;
    for (const bool is_key : {true, false}) {
      const Side& side = is_key ? shape.key : shape.value;
      if (!decode_part<Format>(shape, side, part_of(shape, is_key), in, to)) return false;
    }
  }
  return in.left == 0;
}

}  // namespace

bool is_valid(const Quantized& shape, std::size_t raw_bytes) {
  if (shape.kind != kInt8 && shape.kind != kFloat8) return false;
  if (shape.number < kBfloat16 || shape.number > kFloat32) return false;
  std::size_t bytes = 2 * number_bytes(shape);
  for (const std::int64_t count :
       {shape.units, shape.blocks, shape.block_tokens, shape.heads, shape.head_dim}) {
    if (count < 1 || count > kCountMax) return false;
    bytes *= static_cast<std::size_t>(count);
    if (bytes > raw_bytes) return false;  // before the next product, so that none overflows
  }
  if (raw_bytes - bytes >= kPadding) return false;
  if (shape.tokens < 1 || shape.tokens > std::int64_t{shape.blocks} * shape.block_tokens) {
    return false;
  }
  return is_inside(shape.key, shape) && is_inside(shape.value, shape);
}

std::size_t quantized_bytes(const Quantized& shape) {
  std::size_t of_unit = 0;
  for (const bool is_key : {true, false}) {
    const Part part = part_of(shape, is_key);
    of_unit += 2 * part.groups() + 4 + part.count();
  }
  return sizeof shape + static_cast<std::size_t>(shape.units) * of_unit;
}

std::size_t quantized_encode(const Quantized& shape, const std::uint8_t* raw, std::size_t raw_bytes,
                             std::uint8_t* out, std::size_t capacity) {
  if (!is_valid(shape, raw_bytes)) return 0;
  if (shape.number == kBfloat16) return encode_all<Bfloat16>(shape, raw, out, capacity);
  if (shape.number == kFloat16) return encode_all<Float16>(shape, raw, out, capacity);
  return encode_all<Float32>(shape, raw, out, capacity);
}

bool quantized_decode(std::int32_t kind, const std::uint8_t* in, std::size_t in_bytes,
                      std::uint8_t* out, std::size_t raw_bytes) {
  Input input{in, in_bytes};
  Quantized shape{};
  const std::uint8_t* const head = input.take(sizeof shape);
  if (head == nullptr) return false;
  std::memcpy(&shape, head, sizeof shape);
  if (shape.kind != kind || !is_valid(shape, raw_bytes)) return false;
  std::memset(out, 0, raw_bytes);
  if (shape.number == kBfloat16) return decode_all<Bfloat16>(shape, input, out);
  if (shape.number == kFloat16) return decode_all<Float16>(shape, input, out);
  return decode_all<Float32>(shape, input, out);
}

}  // namespace attnstore::codec
