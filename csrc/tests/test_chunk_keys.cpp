// SPDX-License-Identifier: Apache-2.0
// Names of chunks of any length, under the sanitizers. That they are BLAKE3's is compared with its
// package in tests/unit/index/test_keys.py; here one published digest says that the build is right.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "index/chunk_keys.h"
#include "tests/check.h"

namespace {

using attnstore::blake3;
using attnstore::chunk_key;
using attnstore::ChunkText;
using attnstore::Digest;

void nothing_has_its_published_digest() {
  const Digest empty = blake3(nullptr, 0);
  const std::vector<std::uint8_t> begins = {0xaf, 0x13, 0x49, 0xb9, 0xf5, 0xf9, 0xa1, 0xa6};
  CHECK(std::equal(begins.begin(), begins.end(), empty.begin()));
}

// Each length has memory of its own, so that a byte read beyond it is seen.
void every_length_is_read_to_its_end() {
  Digest last{};
  for (std::size_t size = 0; size < 5000; size += size < 200 ? 1 : 61) {
    std::vector<std::uint8_t> data(size, 7);
    const Digest whole = blake3(data.data(), size);
    CHECK(whole != last);
    CHECK(attnstore::blake3_plain(data.data(), size) == whole);
    if (size > 0) {
      data.back() ^= 1;
      CHECK(blake3(data.data(), size) != whole);
    }
    last = whole;
  }
}

// The parts have memory of their own too.
void what_is_done_beside_changes_no_key(std::mt19937_64& random) {
  const std::string parent(random() % 40, 'p');
  const std::string extra(random() % 3 * 32, 'x');
  const std::string tokens(random() % 5000, 't');
  const ChunkText chunk = {extra, tokens};
  std::string scratch;
  int steps = 0;
  const Digest key = chunk_key(parent, chunk, scratch, [&steps] { ++steps; });
  CHECK(chunk_key(parent, chunk, scratch) == key);
  CHECK(attnstore::blake3_plain(reinterpret_cast<const std::uint8_t*>(scratch.data()),
                                scratch.size()) == key);
  const int blocks = static_cast<int>((scratch.size() + 63) / 64);
  const int chunks = static_cast<int>((scratch.size() + 1023) / 1024);
  CHECK(steps == blocks - chunks);
}

}  // namespace

int main() {
  std::mt19937_64 random(11);
  nothing_has_its_published_digest();
  every_length_is_read_to_its_end();
  for (int round = 0; round < 200; ++round) what_is_done_beside_changes_no_key(random);
  return 0;
}
