// SPDX-License-Identifier: Apache-2.0
#include "codec/lossless.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>

#include "codec/packed.h"
#include "codec/planes.h"
#include "codec/prefix_code.h"

namespace attnstore::codec {

namespace {

constexpr std::uint8_t kStored = 0;
constexpr std::uint8_t kPacked = 3;
constexpr std::uint8_t kFilled = 8;
constexpr std::size_t kMinWords = 256;  // fewer are not worth a code
constexpr std::size_t kSamples = 1024;  // words by which a block's word is told
constexpr std::size_t kStreamMax = 0xffff;

/// What coding a block takes beside input and output.
struct Work {
  std::array<std::uint8_t, kBlockBytes + kStreams * kSlack> top;
  std::array<std::uint8_t, 3 * kBlockBytes / 4> low;
  Table table;
};

Work& work() {
  thread_local const auto mine = std::make_unique<Work>();
  return *mine;
}

std::size_t quarter(std::size_t num_words) { return (num_words + kStreams - 1) / kStreams; }

/// Words of stream i.
std::size_t words_of(std::size_t num_words, std::size_t i) {
  const std::size_t most = quarter(num_words);
  return i + 1 < kStreams ? most : num_words - (kStreams - 1) * most;
}

/// About how many bits a byte takes, coded as words of so many bytes, by a few of them.
double bits_a_byte(const std::uint8_t* raw, std::size_t size, std::size_t word) {
  const std::size_t num_words = size / word;
  const std::size_t step = std::max<std::size_t>(1, num_words / kSamples);
  Counts counts{};
  std::uint32_t total = 0;
  for (std::size_t i = 0; i < num_words; i += step, ++total) ++counts[top_of(raw + i * word, word)];
  double bits = total * std::log2(static_cast<double>(total));
  for (const std::uint32_t count : counts) {
    if (count > 1) bits -= count * std::log2(static_cast<double>(count));
  }
  return (bits / total + 8.0 * static_cast<double>(word - 1)) / static_cast<double>(word);
}

/// The size of the words that these bytes seem to be.
std::size_t likely_word(const std::uint8_t* raw, std::size_t size) {
  std::size_t best = 1;
  double least = 8.0;
  for (const std::size_t word : {2, 4, 1}) {
    if (size % word != 0) continue;
    const double bits = bits_a_byte(raw, size, word);
    if (bits < least) {
      least = bits;
      best = word;
    }
  }
  return best;
}

std::uint8_t* put_lengths(const Lengths& lengths, std::uint8_t* out) {
  const auto has_code = [](std::uint8_t length) { return length > 0; };
  const auto first = std::find_if(lengths.begin(), lengths.end(), has_code) - lengths.begin();
  const auto last = lengths.rend() - std::find_if(lengths.rbegin(), lengths.rend(), has_code) - 1;
  *out++ = static_cast<std::uint8_t>(first);
  *out++ = static_cast<std::uint8_t>(last);
  for (auto byte = first; byte <= last; byte += 2) {
    const unsigned high = byte < last ? lengths[byte + 1] : 0U;
    *out++ = static_cast<std::uint8_t>(lengths[byte] | high << 4);
  }
  return out;
}

/// Encode as words. Returns the end, or null where that is no shorter than the block.
std::uint8_t* encode_words(const std::uint8_t* raw, std::size_t size, std::size_t word,
                           std::uint8_t* out) {
  Work& w = work();
  const std::size_t num_words = size / word;
  if (num_words < kMinWords) return nullptr;
  split(raw, num_words, word, w.top.data(), w.low.data());
  const Lengths lengths = code_lengths(count_bytes(w.top.data(), num_words));
  std::array<std::size_t, kStreams> sizes{};
  const std::size_t most = quarter(num_words);
  std::size_t total = 3 + 128 + 2 * kStreams + num_words * (word - 1);
  for (std::size_t i = 0; i < kStreams; ++i) {
    sizes[i] = stream_bytes(w.top.data() + i * most, words_of(num_words, i), lengths);
    if (sizes[i] > kStreamMax) return nullptr;
    total += sizes[i];
  }
  if (total >= size) return nullptr;
  *out++ = static_cast<std::uint8_t>(word);
  out = put_lengths(lengths, out);
  for (const std::size_t bytes : sizes) {
    *out++ = static_cast<std::uint8_t>(bytes);
    *out++ = static_cast<std::uint8_t>(bytes >> 8);
  }
  const auto codes = assign_codes(lengths);
  for (std::size_t i = 0; i < kStreams; ++i) {
    out = write_stream(w.top.data() + i * most, words_of(num_words, i), codes, out);
  }
  std::memcpy(out, w.low.data(), num_words * (word - 1));
  return out + num_words * (word - 1);
}

/// Encode one block. `out` has room for it stored, and 8 bytes more.
std::uint8_t* encode_block(const std::uint8_t* raw, std::size_t size, bool fast,
                           std::uint8_t* out) {
  if (std::memcmp(raw, raw + 1, size - 1) == 0) {
    out[0] = kFilled;
    out[1] = raw[0];
    return out + 2;
  }
  if (fast && size % 2 == 0) {
    std::uint8_t* const end = pack(raw, size / 2, out + 1, size - 1);
    if (end != nullptr) {
      *out = kPacked;
      return end;
    }
  }
  std::uint8_t* const end = encode_words(raw, size, likely_word(raw, size), out);
  if (end != nullptr) return end;
  *out = kStored;
  std::memcpy(out + 1, raw, size);
  return out + 1 + size;
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

bool take_lengths(Input& in, Lengths& lengths) {
  const std::uint8_t* const range = in.take(2);
  if (range == nullptr || range[0] > range[1]) return false;
  const std::size_t first = range[0];
  const std::size_t count = range[1] - first + std::size_t{1};
  const std::uint8_t* const halves = in.take((count + 1) / 2);
  if (halves == nullptr) return false;
  lengths.fill(0);
  for (std::size_t i = 0; i < count; ++i) lengths[first + i] = halves[i / 2] >> (i % 2 * 4) & 15;
  return true;
}

bool decode_words(Input& in, std::size_t word, std::uint8_t* out, std::size_t size) {
  Work& w = work();
  const std::size_t num_words = size / word;
  if (size % word != 0 || num_words < kMinWords) return false;
  Lengths lengths;
  if (!take_lengths(in, lengths) || !make_table(lengths, w.table)) return false;
  const std::uint8_t* const sizes = in.take(2 * kStreams);
  if (sizes == nullptr) return false;
  std::array<Stream, kStreams> streams{};
  const std::size_t most = quarter(num_words);
  for (std::size_t i = 0; i < kStreams; ++i) {
    const std::size_t bytes = sizes[2 * i] | static_cast<std::size_t>(sizes[2 * i + 1]) << 8;
    std::uint8_t* const top = w.top.data() + i * (most + kSlack);
    streams[i] = {in.take(bytes), bytes, top, words_of(num_words, i)};
    if (streams[i].in == nullptr) return false;
  }
  const std::uint8_t* const low = in.take(num_words * (word - 1));
  if (low == nullptr || !decode_streams(w.table, streams)) return false;
  for (std::size_t i = 0; i < kStreams; ++i) {
    merge(streams[i].out, low, i * most, streams[i].out_size, num_words, word, out);
  }
  return true;
}

bool decode_packed(Input& in, std::uint8_t* out, std::size_t size) {
  const std::size_t taken = size % 2 == 0 ? unpack(in.at, in.left, out, size / 2) : 0;
  in.take(taken);
  return taken > 0;
}

bool decode_block(Input& in, std::uint8_t* out, std::size_t size) {
  const std::uint8_t* const kind = in.take(1);
  if (kind == nullptr) return false;
  switch (*kind) {
    case kStored: {
      const std::uint8_t* const bytes = in.take(size);
      if (bytes != nullptr) std::memcpy(out, bytes, size);
      return bytes != nullptr;
    }
    case kFilled: {
      const std::uint8_t* const byte = in.take(1);
      if (byte != nullptr) std::memset(out, *byte, size);
      return byte != nullptr;
    }
    case 1:
    case 2:
    case 4:
      return decode_words(in, *kind, out, size);
    case kPacked:
      return decode_packed(in, out, size);
    default:
      return false;
  }
}

std::size_t encode(const std::uint8_t* raw, std::size_t raw_bytes, std::uint8_t* out,
                   std::size_t capacity, bool fast) {
  thread_local const auto block = std::make_unique<std::array<std::uint8_t, kBlockBytes + 16>>();
  if (capacity == 0) return 0;
  out[0] = fast ? 1 : 0;
  std::size_t written = 1;
  for (std::size_t at = 0; at < raw_bytes; at += kBlockBytes) {
    const std::size_t size = std::min(kBlockBytes, raw_bytes - at);
    // The last blocks may have less room than they write to on their way.
    const bool has_room = capacity - written >= size + 16;
    std::uint8_t* const to = has_room ? out + written : block->data();
    const auto bytes = static_cast<std::size_t>(encode_block(raw + at, size, fast, to) - to);
    if (bytes > capacity - written) return 0;
    if (!has_room) std::memcpy(out + written, to, bytes);
    written += bytes;
  }
  return written;
}

}  // namespace

std::size_t lossless_bound(std::size_t raw_bytes) {
  return 1 + raw_bytes + (raw_bytes + kBlockBytes - 1) / kBlockBytes;
}

std::size_t lossless_encode(const std::uint8_t* raw, std::size_t raw_bytes, std::uint8_t* out,
                            std::size_t capacity, bool fast) {
  const std::size_t size = fast ? encode(raw, raw_bytes, out, capacity, true) : 0;
  return size > 0 ? size : encode(raw, raw_bytes, out, capacity, false);
}

bool lossless_decode(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                     std::size_t raw_bytes) {
  Input input{in, in_bytes};
  const std::uint8_t* const fast = input.take(1);
  if (fast == nullptr || *fast > 1) return false;
  for (std::size_t at = 0; at < raw_bytes; at += kBlockBytes) {
    if (!decode_block(input, out + at, std::min(kBlockBytes, raw_bytes - at))) return false;
  }
  return input.left == 0;
}

}  // namespace attnstore::codec
