// SPDX-License-Identifier: Apache-2.0
// What one warp does to decode pages out of cells, and to encode pages into them: the twin of
// codec/page_codec.cpp, which has the format, byte for byte. It is compiled for the host as well
// (lanes.h).
//
// A lane has eight numbers of a group of 256: their codes are three bytes of their own. A warp
// decodes a few groups of a page, since an escape is found by the counts of all groups before it.
// It encodes whole pages, group after group: where escapes go depends on those before them.
//
// What is read is trusted in nothing: all addresses are within the cell and the page.
//
// It is long since it has both directions, which share the places of all parts.
#pragma once

#include <cstdint>

#include "cuda/copy_words.h"
#include "cuda/lanes.h"

namespace attnstore {

constexpr std::uint32_t kCodeGroup = 256;  // numbers
constexpr std::uint32_t kEight = 8;        // numbers of a lane
constexpr std::uint32_t kGroupCodeBytes = kCodeGroup / kEight * 3;
constexpr std::uint32_t kGroupsOfPart = 8;     // that a warp decodes
constexpr std::uint32_t kPartsMax = 1U << 26;  // of one job
constexpr std::uint32_t kEscapeCode = 7;
constexpr std::uint32_t kLastBase = 255 - 6;
constexpr std::uint32_t kNoBase = 255;  // of the first group of a page that did not fit

// Where the parts of an encoded page are; page_codec.h.
struct CodeParts {
  std::uint32_t numbers;
  std::uint32_t groups;
  std::uint32_t bases;  // codes come behind the numbers
  std::uint32_t counts;
  std::uint32_t escapes;
};

inline CodeParts code_parts(std::uint64_t page_bytes) {
  const auto numbers = static_cast<std::uint32_t>(page_bytes / 2);
  const std::uint32_t groups = (numbers + kCodeGroup - 1) / kCodeGroup;
  const std::uint32_t bases = numbers + (numbers + kEight - 1) / kEight * 3;
  return {numbers, groups, bases, bases + groups, bases + 2 * groups};
}

// The arrays are as those of a CopyJob; of `runs` the block's side counts. A cell is in the place
// of the other side's first run.
struct CodeJob {
  const Offsets* pages;
  const Offsets* layers;
  const Offsets* runs;
  Divisor num_pages;
  Divisor parts_per_page;  // a part is what one warp does at a time
  Divisor run_bytes;
  CodeParts parts;
  std::uint32_t cell_bytes;
  std::uint32_t num_parts;  // of all pages in all layers of the job
  std::uint64_t failed;     // of a word that gets 1 when a page cannot be decoded, or does not fit
};

// The numbers of one lane, two a word, and how many there are: at most eight.
struct LaneNumbers {
  std::uint32_t pairs[kEight / 2];
};

ATTNSTORE_HOST_DEVICE inline std::uint32_t lane_count(std::uint32_t in_group, std::uint32_t lane) {
  const std::uint32_t before = lane * kEight;
  if (before >= in_group) return 0;
  return in_group - before < kEight ? in_group - before : kEight;
}

ATTNSTORE_HOST_DEVICE inline std::uint32_t number_at(const LaneNumbers& lane, std::uint32_t i) {
  return lane.pairs[i / 2] >> (16 * (i % 2)) & 0xffffU;
}

// The address of the byte of a page, on the side of the block.
ATTNSTORE_HOST_DEVICE inline std::uint64_t in_block(const CodeJob& job, std::uint64_t block,
                                                    std::uint32_t byte, bool is_target) {
  const std::uint32_t run = quotient(byte, job.run_bytes);
  const std::uint64_t offset = is_target ? job.runs[run].target : job.runs[run].source;
  return block + offset + (byte - run * job.run_bytes.divisor);
}

ATTNSTORE_HOST_DEVICE inline void tell_failed(const CodeJob& job) {
  each_lane([&](std::uint32_t lane) {
    if (lane == 0) store_word<Word4>(job.failed, 1);
  });
}

struct CodePlace {
  Offsets at;
  std::uint32_t part;  // of the page
};

ATTNSTORE_HOST_DEVICE inline CodePlace place_of_part(const CodeJob& job, std::uint32_t part) {
  const std::uint32_t of_layers = quotient(part, job.parts_per_page);
  const std::uint32_t layer = quotient(of_layers, job.num_pages);
  const std::uint32_t page = of_layers - layer * job.num_pages.divisor;
  return {job.pages[page] + job.layers[layer], part - of_layers * job.parts_per_page.divisor};
}

// ---- decoding ----------------------------------------------------------------------------

// The 24 bits of each lane's codes; 0 where it has no number.
ATTNSTORE_HOST_DEVICE inline Numbers load_codes(const CodeParts& parts, std::uint64_t cell,
                                                std::uint32_t group, std::uint32_t in_group) {
  const std::uint64_t codes = cell + parts.numbers + group * std::uint64_t{kGroupCodeBytes};
  Numbers bits;
  if (parts.numbers % 4 != 0) {
    each_lane([&](std::uint32_t lane) {
      bits[lane] = 0;
      for (std::uint32_t i = 0; i < 3 && lane_count(in_group, lane) != 0; ++i) {
        bits[lane] |= std::uint32_t{load_word<Word1>(codes + 3 * lane + i)} << 8 * i;
      }
    });
    return bits;
  }
  // By words, each once: that of a host's memory comes over PCIe.
  const std::uint32_t bytes = (in_group + kEight - 1) / kEight * 3;
  Numbers words;
  Numbers first;
  Numbers second;
  each_lane([&](std::uint32_t lane) {
    words[lane] = 4 * lane < bytes ? load_word<Word4>(codes + 4 * lane) : 0;
    first[lane] = 3 * lane / 4;
    second[lane] = (3 * lane / 4 + 1) % kWarpLanes;
  });
  const Numbers low = from_lanes(words, first);
  const Numbers high = from_lanes(words, second);
  each_lane([&](std::uint32_t lane) {
    const std::uint64_t both = std::uint64_t{high[lane]} << 32 | low[lane];
    const auto ours = static_cast<std::uint32_t>(both >> 8 * (3 * lane % 4)) & 0xffffffU;
    bits[lane] = lane_count(in_group, lane) != 0 ? ours : 0;
  });
  return bits;
}

// Sign and mantissa of the lane's numbers, a byte each.
ATTNSTORE_HOST_DEVICE inline Word8 load_low(std::uint64_t address, std::uint32_t count) {
  if (count == kEight) return load_word<Word8>(address);
  Word8 low = {};
  for (std::uint32_t i = 0; i < count; ++i) {
    low.parts[i / 4] |= std::uint32_t{load_word<Word1>(address + i)} << 8 * (i % 4);
  }
  return low;
}

// `Word`: Word16, of pages whose runs are whole ones; or uint16_t, of all.
template <typename Word>
ATTNSTORE_HOST_DEVICE inline void store_numbers(const CodeJob& job, std::uint64_t block,
                                                std::uint32_t first, std::uint32_t count,
                                                const LaneNumbers& numbers) {
  if (count == 0) return;
  if constexpr (sizeof(Word) == 16) {
    store_word<Word16>(in_block(job, block, 2 * first, true),
                       {{numbers.pairs[0], numbers.pairs[1], numbers.pairs[2], numbers.pairs[3]}});
  } else {
    for (std::uint32_t i = 0; i < count; ++i) {
      store_word<std::uint16_t>(in_block(job, block, 2 * (first + i), true),
                                static_cast<std::uint16_t>(number_at(numbers, i)));
    }
  }
}

// False if it is no group with just so many escapes.
template <typename Word>
ATTNSTORE_HOST_DEVICE inline bool decode_group(const CodeJob& job, const Offsets& at,
                                               std::uint32_t group, std::uint32_t* end) {
  const CodeParts& parts = job.parts;
  const std::uint64_t cell = at.source;
  const std::uint32_t base = load_word<Word1>(cell + parts.bases + group);
  const std::uint32_t count = load_word<Word1>(cell + parts.counts + group);
  if (base > kLastBase || count > job.cell_bytes - *end) return false;
  const std::uint32_t before_group = group * kCodeGroup;
  const std::uint32_t left = parts.numbers - before_group;
  const std::uint32_t in_group = left < kCodeGroup ? left : kCodeGroup;
  const Numbers bits = load_codes(parts, cell, group, in_group);
  Numbers escapes;
  each_lane([&](std::uint32_t lane) {
    const std::uint32_t all = bits[lane];
    std::uint32_t ours = all & all >> 1 & all >> 2 & 0x249249U;  // a bit each
    escapes[lane] = 0;
    for (; ours != 0; ours &= ours - 1) ++escapes[lane];
  });
  if (sum_of(escapes) != count) return false;
  const Numbers before = sums_before(escapes);
  each_lane([&](std::uint32_t lane) {
    const std::uint32_t first = before_group + lane * kEight;
    const std::uint32_t here = lane_count(in_group, lane);
    const Word8 low = load_low(cell + first, here);
    std::uint64_t next = cell + *end + before[lane];
    LaneNumbers numbers = {};
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kEight; ++i) {
      const std::uint32_t code = bits[lane] >> 3 * i & 7;
      std::uint32_t top = base + code;
      if (code == kEscapeCode) top = load_word<Word1>(next++);
      const std::uint32_t rest = low.parts[i / 4] >> 8 * (i % 4) & 0xff;
      const std::uint32_t number = (rest & 0x80) << 8 | top << 7 | (rest & 0x7f);
      numbers.pairs[i / 2] |= number << 16 * (i % 2);
    }
    store_numbers<Word>(job, at.target, first, here, numbers);
  });
  *end += count;
  return true;
}

template <typename Word>
ATTNSTORE_HOST_DEVICE inline void decode_part(const CodeJob& job, std::uint32_t number) {
  const CodePlace place = place_of_part(job, number);
  const std::uint32_t first = place.part * kGroupsOfPart;
  Numbers before;
  each_lane([&](std::uint32_t lane) {
    before[lane] = 0;
    for (std::uint32_t group = lane; group < first; group += kWarpLanes) {
      before[lane] += load_word<Word1>(place.at.source + job.parts.counts + group);
    }
  });
  const std::uint32_t skipped = sum_of(before);
  if (skipped > job.cell_bytes - job.parts.escapes) {
    tell_failed(job);
    return;
  }
  std::uint32_t end = job.parts.escapes + skipped;
  for (std::uint32_t i = 0; i < kGroupsOfPart && first + i < job.parts.groups; ++i) {
    if (!decode_group<Word>(job, place.at, first + i, &end)) {
      tell_failed(job);
      return;
    }
  }
}

// ---- encoding ----------------------------------------------------------------------------

template <typename Word>
ATTNSTORE_HOST_DEVICE inline LaneNumbers load_numbers(const CodeJob& job, std::uint64_t block,
                                                      std::uint32_t first, std::uint32_t count) {
  LaneNumbers numbers = {};
  if (count == 0) return numbers;
  if constexpr (sizeof(Word) == 16) {
    const Word16 word = load_word<Word16>(in_block(job, block, 2 * first, false));
    for (std::uint32_t i = 0; i < kEight / 2; ++i) numbers.pairs[i] = word.parts[i];
  } else {
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t number =
          load_word<std::uint16_t>(in_block(job, block, 2 * (first + i), false));
      numbers.pairs[i / 2] |= number << 16 * (i % 2);
    }
  }
  return numbers;
}

// As base_of() of the codec: the lowest of those by which most numbers have a code.
ATTNSTORE_HOST_DEVICE inline std::uint32_t base_of_group(const Lanes<LaneNumbers>& numbers,
                                                         std::uint32_t in_group) {
  Numbers extremes;
  const auto tops = [&](std::uint32_t lane, std::uint32_t i) {
    return number_at(numbers[lane], i) >> 7 & 0xff;
  };
  each_lane([&](std::uint32_t lane) {
    extremes[lane] = 255;
    for (std::uint32_t i = 0; i < lane_count(in_group, lane); ++i) {
      const std::uint32_t top = tops(lane, i);
      if (top < extremes[lane]) extremes[lane] = top;
    }
  });
  const std::uint32_t least = least_of(extremes);
  each_lane([&](std::uint32_t lane) {
    extremes[lane] = 0;
    for (std::uint32_t i = 0; i < lane_count(in_group, lane); ++i) {
      const std::uint32_t top = tops(lane, i);
      if (top > extremes[lane]) extremes[lane] = top;
    }
  });
  const std::uint32_t most = most_of(extremes);
  if (most - least < kEscapeCode) return least < kLastBase ? least : kLastBase;
  std::uint32_t best = 0;
  std::uint32_t base = least;
  for (std::uint32_t first = least; first + kEscapeCode - 1 <= most; ++first) {
    Numbers covered;
    each_lane([&](std::uint32_t lane) {
      const std::uint32_t count = lane_count(in_group, lane);
      covered[lane] = 0;
      ATTNSTORE_UNROLL
      for (std::uint32_t i = 0; i < kEight; ++i) {
        if (i < count && tops(lane, i) - first < kEscapeCode) ++covered[lane];
      }
    });
    const std::uint32_t sum = sum_of(covered);
    if (sum > best) {
      best = sum;
      base = first;
    }
  }
  return base;
}

ATTNSTORE_HOST_DEVICE inline void store_codes(const CodeParts& parts, std::uint64_t cell,
                                              std::uint32_t group, std::uint32_t in_group,
                                              const Numbers& bits) {
  const std::uint64_t codes = cell + parts.numbers + group * std::uint64_t{kGroupCodeBytes};
  if (parts.numbers % 4 != 0) {
    each_lane([&](std::uint32_t lane) {
      for (std::uint32_t i = 0; i < 3 && lane_count(in_group, lane) != 0; ++i) {
        store_word<Word1>(codes + 3 * lane + i, static_cast<Word1>(bits[lane] >> 8 * i));
      }
    });
    return;
  }
  const std::uint32_t bytes = (in_group + kEight - 1) / kEight * 3;
  Numbers first;
  Numbers second;
  each_lane([&](std::uint32_t lane) {
    first[lane] = 4 * lane / 3 % kWarpLanes;
    second[lane] = (4 * lane / 3 + 1) % kWarpLanes;
  });
  const Numbers low = from_lanes(bits, first);
  const Numbers high = from_lanes(bits, second);
  each_lane([&](std::uint32_t lane) {
    const std::uint64_t both = std::uint64_t{high[lane]} << 24 | low[lane];
    const auto word = static_cast<std::uint32_t>(both >> 8 * (4 * lane % 3));
    if (4 * lane + 4 <= bytes) {
      store_word<Word4>(codes + 4 * lane, word);
    } else {
      for (std::uint32_t i = 0; 4 * lane + i < bytes; ++i) {
        store_word<Word1>(codes + 4 * lane + i, static_cast<Word1>(word >> 8 * i));
      }
    }
  });
}

ATTNSTORE_HOST_DEVICE inline void store_low(std::uint64_t address, std::uint32_t count,
                                            const LaneNumbers& numbers) {
  Word8 low = {};
  ATTNSTORE_UNROLL
  for (std::uint32_t i = 0; i < kEight; ++i) {
    const std::uint32_t number = number_at(numbers, i);
    low.parts[i / 4] |= ((number & 0x7f) | (number >> 8 & 0x80)) << 8 * (i % 4);
  }
  if (count == kEight) {
    store_word<Word8>(address, low);
    return;
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    store_word<Word1>(address + i, static_cast<Word1>(low.parts[i / 4] >> 8 * (i % 4)));
  }
}

// False if its escapes do not fit.
template <typename Word>
ATTNSTORE_HOST_DEVICE inline bool encode_group(const CodeJob& job, const Offsets& at,
                                               std::uint32_t group, std::uint32_t* end) {
  const CodeParts& parts = job.parts;
  const std::uint64_t cell = at.target;
  const std::uint32_t before_group = group * kCodeGroup;
  const std::uint32_t left = parts.numbers - before_group;
  const std::uint32_t in_group = left < kCodeGroup ? left : kCodeGroup;
  Lanes<LaneNumbers> numbers;
  each_lane([&](std::uint32_t lane) {
    numbers[lane] = load_numbers<Word>(job, at.source, before_group + lane * kEight,
                                       lane_count(in_group, lane));
  });
  const std::uint32_t base = base_of_group(numbers, in_group);
  Numbers bits;
  Numbers escapes;
  each_lane([&](std::uint32_t lane) {
    const std::uint32_t count = lane_count(in_group, lane);
    bits[lane] = 0;
    escapes[lane] = 0;
    ATTNSTORE_UNROLL
    for (std::uint32_t i = 0; i < kEight; ++i) {
      if (i >= count) break;
      const std::uint32_t code = (number_at(numbers[lane], i) >> 7 & 0xff) - base;  // wraps
      const bool is_escape = code >= kEscapeCode;
      bits[lane] |= (is_escape ? kEscapeCode : code) << 3 * i;
      escapes[lane] += is_escape ? 1 : 0;
    }
  });
  const std::uint32_t count = sum_of(escapes);
  if (count > job.cell_bytes - *end) return false;
  const Numbers before = sums_before(escapes);
  store_codes(parts, cell, group, in_group, bits);
  each_lane([&](std::uint32_t lane) {
    const std::uint32_t first = before_group + lane * kEight;
    store_low(cell + first, lane_count(in_group, lane), numbers[lane]);
    std::uint64_t next = cell + *end + before[lane];
    for (std::uint32_t i = 0; escapes[lane] != 0 && i < kEight; ++i) {
      if ((bits[lane] >> 3 * i & 7) != kEscapeCode) continue;
      store_word<Word1>(next++, static_cast<Word1>(number_at(numbers[lane], i) >> 7));
    }
    if (lane != 0) return;
    store_word<Word1>(cell + parts.bases + group, static_cast<Word1>(base));
    store_word<Word1>(cell + parts.counts + group, static_cast<Word1>(count));
  });
  *end += count;
  return true;
}

// Behind the encoding: the same page makes the same bytes.
ATTNSTORE_HOST_DEVICE inline void store_zeros(std::uint64_t cell, std::uint32_t begin,
                                              std::uint32_t end) {
  const std::uint32_t aligned = (begin + 3) / 4 * 4;
  each_lane([&](std::uint32_t lane) {
    if (begin + lane < aligned && begin + lane < end) store_word<Word1>(cell + begin + lane, 0);
    for (std::uint32_t at = aligned + 4 * lane; at < end; at += 4 * kWarpLanes) {
      store_word<Word4>(cell + at, 0);
    }
  });
}

template <typename Word>
ATTNSTORE_HOST_DEVICE inline void encode_part(const CodeJob& job, std::uint32_t number) {
  const Offsets at = place_of_part(job, number).at;
  std::uint32_t end = job.parts.escapes;
  for (std::uint32_t group = 0; group < job.parts.groups; ++group) {
    if (encode_group<Word>(job, at, group, &end)) continue;
    each_lane([&](std::uint32_t lane) {
      if (lane == 0) store_word<Word1>(at.target + job.parts.bases, kNoBase);
    });
    tell_failed(job);
    return;
  }
  store_zeros(at.target, end, job.cell_bytes);
}

// `num_threads` is a multiple of kWarpLanes.
template <typename Word, bool is_decoding>
ATTNSTORE_HOST_DEVICE inline void code_words(const CodeJob& job, std::uint32_t thread,
                                             std::uint32_t num_threads) {
  if (!works_for_warp(thread)) return;
  for (std::uint32_t part = thread / kWarpLanes; part < job.num_parts;
       part += num_threads / kWarpLanes) {
    if constexpr (is_decoding) {
      decode_part<Word>(job, part);
    } else {
      encode_part<Word>(job, part);
    }
  }
}

}  // namespace attnstore
