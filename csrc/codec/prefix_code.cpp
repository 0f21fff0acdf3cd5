// SPDX-License-Identifier: Apache-2.0
#include "codec/prefix_code.h"

#include <algorithm>
#include <cstring>

namespace attnstore::codec {

namespace {

constexpr unsigned kWindow = 64;
constexpr std::size_t kLookups = 5;    // of 11 bits each, in the 57 bits that a window has at least
constexpr std::size_t kStepBytes = 8;  // of input that a step looks at
constexpr std::size_t kStepOutput = kLookups * 4;

std::uint64_t load_big_endian(const std::uint8_t* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, sizeof word);
  return __builtin_bswap64(word);
}

void store_big_endian(std::uint8_t* at, std::uint64_t word) {
  word = __builtin_bswap64(word);
  std::memcpy(at, &word, sizeof word);
}

/// The 8 bytes at `at`, with zeros behind the end.
std::uint64_t load_end(const std::uint8_t* in, std::size_t size, std::size_t at) {
  std::array<std::uint8_t, 8> bytes{};
  if (at < size) std::memcpy(bytes.data(), in + at, std::min(size - at, bytes.size()));
  return load_big_endian(bytes.data());
}

/// Depths in the Huffman tree of `sorted`, which are counts that rise.
std::array<unsigned, 256> tree_depths(const std::array<std::uint32_t, 256>& sorted,
                                      std::size_t num_leaves) {
  std::array<std::uint64_t, 512> weight{};
  std::array<std::size_t, 512> parent{};
  for (std::size_t i = 0; i < num_leaves; ++i) weight[i] = sorted[i];
  std::size_t leaf = 0;
  std::size_t inner = num_leaves;
  const std::size_t root = 2 * num_leaves - 2;
  for (std::size_t node = num_leaves; node <= root; ++node) {
    for (int child = 0; child < 2; ++child) {
      const bool takes_leaf = leaf < num_leaves && (inner >= node || weight[leaf] <= weight[inner]);
      const std::size_t taken = takes_leaf ? leaf++ : inner++;
      weight[node] += weight[taken];
      parent[taken] = node;
    }
  }
  std::array<unsigned, 512> depth{};
  for (std::size_t node = root; node-- > 0;) depth[node] = depth[parent[node]] + 1;
  std::array<unsigned, 256> depths{};
  std::copy_n(depth.begin(), num_leaves, depths.begin());
  return depths;
}

/// Cut depths to kCodeBits, and lengthen others, rarest first, until all codes have room; what
/// room is left then shortens the most frequent ones that it is enough for.
void limit_depths(std::array<unsigned, 256>& depths, std::size_t num_leaves) {
  std::size_t used = 0;
  const auto share = [](unsigned depth) { return kTableSize >> depth; };
  for (std::size_t i = 0; i < num_leaves; ++i) {
    depths[i] = std::min(depths[i], kCodeBits);
    used += share(depths[i]);
  }
  while (used > kTableSize) {
    for (std::size_t i = 0; i < num_leaves && used > kTableSize; ++i) {
      if (depths[i] == kCodeBits) continue;
      used -= share(depths[i]) - share(depths[i] + 1);
      ++depths[i];
    }
  }
  while (used < kTableSize) {
    for (std::size_t i = num_leaves; i-- > 0 && used < kTableSize;) {
      if (depths[i] < 2 || used + share(depths[i]) > kTableSize) continue;
      used += share(depths[i]);
      --depths[i];
    }
  }
}

/// Pairs from single codes, then fours from pairs: `second` continues `first`, where it fits.
Entry joined(const Entry& first, const Entry& second) {
  Entry both = first;
  const auto add = [&](unsigned count, unsigned bits) {
    std::uint32_t mine = 0;
    std::uint32_t more = 0;
    std::memcpy(&mine, first.bytes.data(), sizeof mine);
    std::memcpy(&more, second.bytes.data(), sizeof more);
    mine |= more << (8 * first.count);
    std::memcpy(both.bytes.data(), &mine, sizeof mine);
    both.count = static_cast<std::uint8_t>(first.count + count);
    both.bits = static_cast<std::uint8_t>(first.bits + bits);
  };
  if (first.bits + second.bits <= static_cast<int>(kCodeBits)) {
    add(second.count, second.bits);
  } else if (first.bits + second.first_bits <= static_cast<int>(kCodeBits)) {
    add(1, second.first_bits);
  }
  return both;
}

void join_all(const Table& from, Table& to) {
  for (std::size_t i = 0; i < kTableSize; ++i) {
    to[i] = joined(from[i], from[(i << from[i].bits) & (kTableSize - 1)]);
  }
}

/// The end of a stream, a byte or an entry at a time. `at` and `used`: where its bits go on.
bool decode_end(const Table& table, const Stream& stream, std::size_t at, unsigned used,
                std::size_t done) {
  while (done < stream.out_size) {
    at += used / 8;
    used %= 8;
    if (at > stream.in_size) return false;
    const std::uint64_t window = load_end(stream.in, stream.in_size, at) << used;
    const Entry& entry = table[window >> (kWindow - kCodeBits)];
    if (stream.out_size - done >= entry.count) {
      std::memcpy(stream.out + done, entry.bytes.data(), 4);
      done += entry.count;
      used += entry.bits;
    } else {
      stream.out[done++] = entry.bytes[0];
      used += entry.first_bits;
    }
  }
  return at + (used + 7) / 8 == stream.in_size;
}

}  // namespace

Counts count_bytes(const std::uint8_t* data, std::size_t size) {
  std::array<Counts, 4> parts{};  // apart, since increments of one counter wait for each other
  std::size_t i = 0;
  for (; i + 4 <= size; i += 4) {
    for (std::size_t j = 0; j < 4; ++j) ++parts[j][data[i + j]];
  }
  for (; i < size; ++i) ++parts[0][data[i]];
  Counts counts{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    for (const Counts& part : parts) counts[byte] += part[byte];
  }
  return counts;
}

Lengths code_lengths(const Counts& counts) {
  std::array<std::uint8_t, 256> order{};
  std::size_t num_leaves = 0;
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (counts[byte] > 0) order[num_leaves++] = static_cast<std::uint8_t>(byte);
  }
  // A complete code has two bytes at least; the other one is never used.
  for (std::size_t byte = 0; num_leaves < 2; ++byte) {
    if (counts[byte] == 0) order[num_leaves++] = static_cast<std::uint8_t>(byte);
  }
  std::sort(order.begin(), order.begin() + num_leaves, [&](std::uint8_t a, std::uint8_t b) {
    return counts[a] != counts[b] ? counts[a] < counts[b] : a < b;
  });
  std::array<std::uint32_t, 256> sorted{};
  for (std::size_t i = 0; i < num_leaves; ++i) sorted[i] = counts[order[i]];
  auto depths = tree_depths(sorted, num_leaves);
  limit_depths(depths, num_leaves);
  Lengths lengths{};
  for (std::size_t i = 0; i < num_leaves; ++i) {
    lengths[order[i]] = static_cast<std::uint8_t>(depths[i]);
  }
  return lengths;
}

std::size_t stream_bytes(const std::uint8_t* data, std::size_t size, const Lengths& lengths) {
  const Counts counts = count_bytes(data, size);
  std::size_t bits = 0;
  for (std::size_t byte = 0; byte < 256; ++byte) bits += counts[byte] * lengths[byte];
  return (bits + 7) / 8;
}

std::array<Code, 256> assign_codes(const Lengths& lengths) {
  std::array<Code, 256> codes{};
  std::uint64_t next = 0;  // in units of the longest code
  for (unsigned length = 1; length <= kCodeBits; ++length) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      if (lengths[byte] != length) continue;
      codes[byte] = {next << (kWindow - kCodeBits), length};
      next += kTableSize >> length;
    }
  }
  return codes;
}

std::uint8_t* write_stream(const std::uint8_t* data, std::size_t size,
                           const std::array<Code, 256>& codes, std::uint8_t* out) {
  std::uint64_t window = 0;
  unsigned used = 0;
  const auto flush = [&] {
    store_big_endian(out, window);
    const unsigned whole = used & ~7U;
    out += whole / 8;
    window <<= whole;
    used -= whole;
  };
  const auto add = [&](std::uint8_t byte) {
    window |= codes[byte].bits >> used;
    used += codes[byte].length;
  };
  std::size_t i = 0;
  for (; i + kLookups <= size; i += kLookups) {
    for (std::size_t j = 0; j < kLookups; ++j) add(data[i + j]);
    flush();
  }
  for (; i < size; ++i) {
    add(data[i]);
    flush();
  }
  store_big_endian(out, window);
  return out + (used + 7) / 8;
}

bool make_table(const Lengths& lengths, Table& table) {
  std::size_t at = 0;
  Table single;
  for (unsigned length = 1; length <= kCodeBits; ++length) {
    const std::size_t share = kTableSize >> length;
    for (std::size_t byte = 0; byte < 256; ++byte) {
      if (lengths[byte] != length) continue;
      if (at + share > kTableSize) return false;
      const auto bits = static_cast<std::uint8_t>(length);
      const Entry entry{{static_cast<std::uint8_t>(byte), 0, 0, 0}, bits, 1, bits, 0};
      std::fill_n(single.begin() + at, share, entry);
      at += share;
    }
  }
  if (at != kTableSize) return false;
  Table pairs;
  join_all(single, pairs);
  join_all(pairs, table);
  return true;
}

bool decode_streams(const Table& table, const std::array<Stream, kStreams>& streams) {
  std::array<std::size_t, kStreams> at{};
  std::array<std::size_t, kStreams> done{};
  std::array<unsigned, kStreams> used{};
  while (true) {
    std::size_t steps = ~std::size_t{0};
    for (std::size_t i = 0; i < kStreams; ++i) {
      const std::size_t in_left = streams[i].in_size - std::min(at[i], streams[i].in_size);
      const std::size_t out_left = streams[i].out_size - done[i];
      steps = std::min({steps, in_left / kStepBytes, out_left / kStepOutput});
    }
    if (steps == 0) break;
    std::array<const std::uint8_t*, kStreams> in{};
    std::array<std::uint8_t*, kStreams> out{};
    for (std::size_t i = 0; i < kStreams; ++i) {
      in[i] = streams[i].in + at[i];
      out[i] = streams[i].out + done[i];
    }
    for (; steps > 0; --steps) {
      std::array<std::uint64_t, kStreams> window{};
      for (std::size_t i = 0; i < kStreams; ++i) window[i] = load_big_endian(in[i]) << used[i];
      for (std::size_t lookup = 0; lookup < kLookups; ++lookup) {
        for (std::size_t i = 0; i < kStreams; ++i) {
          const Entry entry = table[window[i] >> (kWindow - kCodeBits)];
          std::memcpy(out[i], entry.bytes.data(), 4);
          out[i] += entry.count;
          window[i] <<= entry.bits;
          used[i] += entry.bits;
        }
      }
      for (std::size_t i = 0; i < kStreams; ++i) {
        in[i] += used[i] / 8;
        used[i] %= 8;
      }
    }
    for (std::size_t i = 0; i < kStreams; ++i) {
      at[i] = static_cast<std::size_t>(in[i] - streams[i].in);
      done[i] = static_cast<std::size_t>(out[i] - streams[i].out);
    }
  }
  for (std::size_t i = 0; i < kStreams; ++i) {
    if (!decode_end(table, streams[i], at[i], used[i], done[i])) return false;
  }
  return true;
}

}  // namespace attnstore::codec
