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

Bytes encoded(const Bytes& raw) {
  Bytes out(lossless_bound(raw.size()));
  out.resize(lossless_encode(raw.data(), raw.size(), out.data(), out.size()));
  out.shrink_to_fit();  // so that the sanitizer sees what is read behind it
  return out;
}

void comes_back(const Bytes& raw) {
  const Bytes out = encoded(raw);
  CHECK(!out.empty() || raw.empty());
  Bytes back(raw.size());
  CHECK(lossless_decode(out.data(), out.size(), back.data(), back.size()));
  CHECK(back == raw);
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
  CHECK(encoded(raw).size() <= raw.size() + raw.size() / 100);
  CHECK(encoded(raw).size() <= lossless_bound(raw.size()));
}

void numbers_get_smaller(std::mt19937_64& random) {
  const auto part = [&](std::size_t word) {
    const Bytes raw = numbers(4 * kBlockBytes, word, random);
    return static_cast<double>(encoded(raw).size()) / static_cast<double>(raw.size());
  };
  CHECK(part(2) < 0.68);
  CHECK(part(4) < 0.84);
}

void too_little_room_is_said(std::mt19937_64& random) {
  const Bytes raw = numbers(3 * kBlockBytes + 10, 2, random);
  const std::size_t size = encoded(raw).size();
  for (const std::size_t room : {std::size_t{0}, std::size_t{1}, size / 2, size - 1, size}) {
    Bytes out(room);
    CHECK(lossless_encode(raw.data(), raw.size(), out.data(), room) == (room == size ? size : 0));
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
  std::vector<Bytes> goods;
  for (const Bytes& raw : raws) goods.push_back(encoded(raw));
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
  too_little_room_is_said(random);
  damaged(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000, random);
  return 0;
}
