// SPDX-License-Identifier: Apache-2.0
// Names of chunks of any length, under the sanitizers. That they are BLAKE3's is compared with its
// package in tests/unit/index/test_keys.py; here one published digest says that the build is right.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "index/chunk_keys.h"
#include "tests/check.h"

namespace {

using attnstore::blake3;
using attnstore::chain_keys;
using attnstore::ChunkText;
using attnstore::Digest;

std::string_view text(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

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

void a_chain_is_its_links(std::mt19937_64& random) {
  std::vector<std::string> tokens;
  for (std::size_t i = 0; i < 40; ++i) tokens.emplace_back(random() % 2000, static_cast<char>(i));
  const std::string extra(32, 'x');
  std::vector<ChunkText> chunks;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    chunks.push_back({i % 3 == 0 ? std::string_view(extra) : std::string_view(), tokens[i]});
  }
  const std::string root(32, 'r');
  const std::vector<Digest> keys = chain_keys(root, chunks);
  std::string scratch;
  std::string_view parent = root;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    CHECK(attnstore::chunk_key(parent, chunks[i], scratch) == keys[i]);
    parent = text(keys[i]);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(11);
  nothing_has_its_published_digest();
  every_length_is_read_to_its_end();
  for (int round = 0; round < 20; ++round) a_chain_is_its_links(random);
  return 0;
}
