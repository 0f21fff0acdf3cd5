// SPDX-License-Identifier: Apache-2.0
// The lossless codec under the sanitizers: what it encodes it decodes to the same bytes, and what
// was damaged is refused or decoded to other bytes, with nothing touched outside of the buffers.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "codec/lossless.h"
#include "tests/check.h"
#include "tests/damage.h"

namespace {

using attnstore::codec::kBlockBytes;
using attnstore::codec::lossless_bound;
using attnstore::codec::lossless_decode;
using attnstore::codec::lossless_encode;

Bytes encoded(const Bytes& raw, bool fast) {
  Bytes out(lossless_bound(raw.size()));
  out.resize(lossless_encode(raw.data(), raw.size(), out.data(), out.size(), fast));
  out.shrink_to_fit();  // so that the sanitizer sees what is read behind it
  return out;
}

void comes_back(const Bytes& raw) {
  for (const bool fast : {false, true}) {
    const Bytes out = encoded(raw, fast);
    CHECK(!out.empty());
    Bytes back(raw.size());
    CHECK(lossless_decode(out.data(), out.size(), back.data(), back.size()));
    CHECK(back == raw);
  }
}

/// Numbers around zero, as words of so many bytes: few exponents, many mantissas.
Bytes numbers(std::size_t size, std::size_t word, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Bytes made(size);
  for (std::size_t at = 0; at + word <= size; at += word) {
    const float number = normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    for (std::size_t i = 0; i < word; ++i) {
      made[at + i] = static_cast<std::uint8_t>(bits >> (8 * (4 - word + i)));
    }
  }
  return made;
}

/// Every pattern of 16 bits, rare ones often enough too, so that all code lengths occur.
Bytes all_patterns() {
  Bytes made;
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const std::uint32_t times = 1 + (pattern % 997 == 0 ? 40 : 0);
    for (std::uint32_t i = 0; i < times; ++i) {
      made.push_back(static_cast<std::uint8_t>(pattern));
      made.push_back(static_cast<std::uint8_t>(pattern >> 8));
    }
  }
  return made;
}

/// Counts that grow like Fibonacci's numbers: without a limit codes would be longer than 11 bits.
Bytes deep_tree() {
  Bytes made;
  std::size_t count = 1;
  std::size_t before = 1;
  for (std::uint32_t byte = 0; byte < 22; ++byte) {
    made.insert(made.end(), count, static_cast<std::uint8_t>(byte));
    const std::size_t next = count + before;
    before = count;
    count = next;
  }
  return made;
}

void sizes_and_contents(std::mt19937_64& random) {
  comes_back({});
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{2}, std::size_t{7}, std::size_t{255}, std::size_t{511},
        std::size_t{512}, std::size_t{514}, std::size_t{1030}, kBlockBytes - 1, kBlockBytes,
        kBlockBytes + 1, 2 * kBlockBytes + 3000}) {
    for (const std::size_t word : {1, 2, 4}) comes_back(numbers(size, word, random));
    comes_back(noise(size, random));
    comes_back(Bytes(size, 0));
    comes_back(Bytes(size, 0x7f));
  }
  comes_back(all_patterns());
  comes_back(deep_tree());
  Bytes mixed = numbers(kBlockBytes, 2, random);
  for (const std::size_t word : {4, 1}) {
    const Bytes more = numbers(kBlockBytes, word, random);
    mixed.insert(mixed.end(), more.begin(), more.end());
  }
  mixed.insert(mixed.end(), 70000, 0);
  comes_back(mixed);
}

void noise_costs_little(std::mt19937_64& random) {
  const Bytes raw = noise(16 * kBlockBytes + 100, random);
  for (const bool fast : {false, true}) {
    CHECK(encoded(raw, fast).size() <= raw.size() + raw.size() / 100);
    CHECK(encoded(raw, fast).size() <= lossless_bound(raw.size()));
  }
}

void numbers_get_smaller(std::mt19937_64& random) {
  const auto part = [&](std::size_t word, bool fast) {
    const Bytes raw = numbers(4 * kBlockBytes, word, random);
    return static_cast<double>(encoded(raw, fast).size()) / static_cast<double>(raw.size());
  };
  CHECK(part(2, false) < 0.68);
  CHECK(part(2, true) > 0.75);
  CHECK(part(2, true) < 0.76);
  CHECK(part(4, false) < 0.84);
  CHECK(part(4, true) < 0.84);  // not packed: that would not be smaller
}

/// Words with so many exponents that have no code, from none to too many.
void escapes(std::mt19937_64& random) {
  for (const std::size_t one_in : {2, 5, 6, 7, 30, 30000}) {
    for (const std::size_t size : {std::size_t{512}, std::size_t{1026}, kBlockBytes}) {
      Bytes raw = numbers(size, 2, random);
      for (std::size_t at = 1; at < size; at += 2) {
        if (random() % one_in == 0) raw[at] = static_cast<std::uint8_t>(random());
      }
      comes_back(raw);
    }
  }
}

/// Each number of a packed block's head, and places of its escapes.
void heads_of_packed_blocks(std::mt19937_64& random) {
  Bytes raw = numbers(600, 2, random);
  for (const std::size_t at : {1, 301, 599}) raw[at] = 0;
  const Bytes good = encoded(raw, true);
  constexpr std::size_t kBlockHead = 5;  // coding, kind, first, number of escapes
  const std::size_t places = kBlockHead + 150 + 300;
  const std::size_t count = good[3] | static_cast<std::size_t>(good[4]) << 8;
  CHECK(good[1] == 3);
  CHECK(count > 0);
  CHECK(good.size() == places + 3 * count);
  const auto is_taken = [&](const Bytes& bytes) {
    Bytes back(raw.size());
    return lossless_decode(bytes.data(), bytes.size(), back.data(), back.size());
  };
  for (std::uint32_t number = 0; number <= 0xffff; ++number) {
    const auto put = [&](std::size_t at) {
      Bytes bytes = good;
      bytes[at] = static_cast<std::uint8_t>(number);
      bytes[at + 1] = static_cast<std::uint8_t>(number >> 8);
      bytes.shrink_to_fit();
      return bytes;
    };
    CHECK(is_taken(put(3)) == (number == count));
    CHECK(is_taken(put(places)) == (number < 300));
  }
  Bytes many = good;  // more escapes than words, all of them there
  many[3] = 301 & 0xff;
  many[4] = 301 >> 8;
  many.resize(places + std::size_t{3} * 301, 0);
  CHECK(!is_taken(many));
  Bytes other = good;
  other[0] = 2;
  CHECK(!is_taken(other));
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(!is_taken(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size))));
  }
}

/// Where the fast coding has no room, the smaller one is used.
void too_little_room_for_the_fast_one(std::mt19937_64& random) {
  const Bytes raw = numbers(3 * kBlockBytes + 10, 2, random);
  const Bytes small = encoded(raw, false);
  Bytes out(encoded(raw, true).size() - 1);
  const std::size_t size = lossless_encode(raw.data(), raw.size(), out.data(), out.size(), true);
  out.resize(size);
  CHECK(out == small);
}

void too_little_room_is_said(std::mt19937_64& random) {
  const Bytes raw = numbers(3 * kBlockBytes + 10, 2, random);
  const std::size_t size = encoded(raw, false).size();
  for (const std::size_t room : {std::size_t{0}, std::size_t{1}, size / 2, size - 1, size}) {
    for (const bool fast : {false, true}) {
      Bytes out(room);
      CHECK(lossless_encode(raw.data(), raw.size(), out.data(), room, fast) ==
            (room == size ? size : 0));
    }
  }
}

/// Decode damaged encodings. Those cut or with bytes too many have to be refused: none decodes to
/// the right size and ends at its own end.
void damaged(std::uint64_t num_inputs, std::mt19937_64& random) {
  std::vector<Bytes> raws;
  for (const std::size_t size : {600, 1030, 3000}) {
    for (const std::size_t word : {1, 2, 4}) raws.push_back(numbers(size / 4 * 4, word, random));
    raws.push_back(noise(size, random));
    raws.push_back(Bytes(size, 9));
  }
  const std::size_t num_raws = raws.size();
  std::vector<Bytes> goods;
  for (const Bytes& raw : raws) goods.push_back(encoded(raw, false));
  for (std::size_t i = 0; i < num_raws; ++i) {
    goods.push_back(encoded(raws[i], true));
    raws.push_back(raws[i]);
  }
  constexpr std::size_t kHead = 90;  // kind, range, lengths and sizes of streams
  Outcomes outcomes;
  for (std::uint64_t i = 0; i < num_inputs; ++i) {
    const std::size_t which = random() % raws.size();
    Bytes bytes = random() % 8 == 0 ? noise(random() % 300 + 1, random) : goods[which];
    if (bytes.size() > 300 || random() % 2 == 0) damage(bytes, kHead, random);
    Bytes back(raws[which].size());
    const bool is_taken = lossless_decode(bytes.data(), bytes.size(), back.data(), back.size());
    CHECK(!is_taken || !is_cut(bytes, goods[which]));
    outcomes.count(is_taken, back, raws[which]);
  }
  outcomes.print("lossless");
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937_64 random(7);
  sizes_and_contents(random);
  noise_costs_little(random);
  numbers_get_smaller(random);
  escapes(random);
  heads_of_packed_blocks(random);
  too_little_room_is_said(random);
  too_little_room_for_the_fast_one(random);
  damaged(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000, random);
  return 0;
}
