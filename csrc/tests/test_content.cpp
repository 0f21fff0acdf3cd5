// SPDX-License-Identifier: Apache-2.0
// The content index over random sequences that repeat and branch, while chunks come and go: under
// the sanitizers, with every piece compared with the request here as well.
#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

#include "content/content_index.h"
#include "tests/check.h"

namespace {

using attnstore::AnchorTable;
using attnstore::Bytes32;
using attnstore::ContentExtent;
using attnstore::ContentIndex;
using attnstore::kTokenBytes;
using attnstore::WindowHash;
using Tokens = std::vector<std::uint32_t>;

constexpr std::uint32_t kChunk = 80;
constexpr std::size_t kMaxChunks = 60;

const std::uint8_t* bytes(const Tokens& tokens) {
  return reinterpret_cast<const std::uint8_t*>(tokens.data());
}

Bytes32 name(std::uint64_t number) {
  Bytes32 made{};
  number *= 0x9e3779b97f4a7c15ULL;
  for (std::size_t at = 0; at < made.size(); at += 8) std::memcpy(&made[at], &number, 8);
  return made;
}

Tokens draw(std::size_t count, std::uint32_t alphabet, std::mt19937_64& random) {
  Tokens made;
  for (std::size_t i = 0; i < count; ++i) {
    made.push_back(static_cast<std::uint32_t>(random() % alphabet));
  }
  return made;
}

void rolling_is_hashing_anew(std::mt19937_64& random) {
  for (const std::uint32_t window : {1U, 16U, 32U}) {
    const WindowHash hash(random(), window);
    Tokens tokens = draw(300, 1U << 31, random);
    tokens[100] = 0xffffffff;
    const std::uint8_t* at = bytes(tokens);
    std::uint64_t rolling = hash.of(at);
    for (std::size_t i = 0; i + window < tokens.size(); ++i, at += kTokenBytes) {
      rolling = hash.roll(rolling, at, at + window * kTokenBytes);
      CHECK(rolling == hash.of(at + kTokenBytes));
    }
  }
}

void buckets_are_bounded() {
  AnchorTable table(1);  // one bucket
  for (std::uint32_t i = 0; i < 100; ++i) table.insert(1, {i, 64 * i});
  CHECK(table.find(1).count == AnchorTable::kEqualMax);
  CHECK(table.find(1).places[0].id == 99);
  for (std::uint32_t i = 0; i < 3; ++i) table.insert(2, {i, 0});
  for (std::uint32_t i = 100; i < 200; ++i) table.insert(1, {i, 0});
  CHECK(table.find(2).count == 3);  // the others have not pushed them out
  CHECK(table.find(1).places[3].id == 196);
  table.erase(1, {198, 0});
  table.erase(1, {5, 0});  // long gone
  CHECK(table.find(1).count == 3);
  CHECK(table.find(1).places[1].id == 197);
  for (std::uint32_t i = 0; i < 100; ++i) table.insert(3 + i, {i, 0});
  CHECK(table.find(1).count + table.find(2).count == 0);
  CHECK(table.find(102).count == 1);
  table.clear();
  CHECK(table.find(102).count == 0);
}

struct Known {
  Tokens tokens;
  Bytes32 parent;
  Bytes32 domain;
  std::uint32_t native_from;
};

struct World {
  ContentIndex index{kChunk, kMaxChunks, 3};
  std::map<Bytes32, Known> known;  // what ever was entered
  std::vector<Tokens> sequences;
  std::uint64_t num_names = 0;

  void add_sequence(const Tokens& tokens, std::mt19937_64& random) {
    const Bytes32 domain = name(random() % 4 == 0 ? 1 : 0);
    Bytes32 parent = name(++num_names);
    for (std::size_t at = 0; at < tokens.size(); at += kChunk) {
      const auto stop = static_cast<std::ptrdiff_t>(std::min(at + kChunk, tokens.size()));
      const Tokens some(tokens.begin() + static_cast<std::ptrdiff_t>(at), tokens.begin() + stop);
      const auto size = static_cast<std::uint32_t>(some.size());
      const auto native_from =
          random() % 5 == 0 ? static_cast<std::uint32_t>(random() % (size + 1)) : 0;
      const Bytes32 key = name(++num_names);
      index.add({key, parent, domain, bytes(some), size, native_from, random() % 2 == 0});
      known[key] = {some, parent, domain, native_from};
      parent = key;
    }
    sequences.push_back(tokens);
  }

  Tokens slice(std::mt19937_64& random) const {
    const Tokens& all = sequences[random() % sequences.size()];
    const std::size_t a = random() % (all.size() + 1);
    const std::size_t b = random() % (all.size() + 1);
    return {all.begin() + static_cast<std::ptrdiff_t>(std::min(a, b)),
            all.begin() + static_cast<std::ptrdiff_t>(std::max(a, b))};
  }

  std::uint32_t ask(const Tokens& prompt, std::mt19937_64& random) {
    // A memory of its own, so that a sanitizer sees what is beyond its end.
    const Tokens tokens(prompt.begin(), prompt.end());
    const auto size = static_cast<std::uint32_t>(tokens.size());
    const auto start = static_cast<std::uint32_t>(random() % (size / 4 + 1));
    const Bytes32 domain = name(random() % 8 / 6);
    const attnstore::ContentQuery query{domain, bytes(tokens), start, size, 1 + start % 50, 64};
    const std::uint32_t cover = check(index.find(query), tokens, domain, start, false);
    return cover + check(index.find_all(query), tokens, domain, start, true);
  }

  // What is found is there, in its order. Returns how many tokens it has.
  std::uint32_t check(const std::vector<ContentExtent>& extents, const Tokens& tokens,
                      const Bytes32& domain, std::uint32_t start, bool may_have_gaps) const {
    const auto size = static_cast<std::uint32_t>(tokens.size());
    std::uint32_t at = start;
    std::uint32_t num_found = 0;
    for (const ContentExtent& extent : extents) {
      CHECK(!extent.pieces.empty());
      if (may_have_gaps) {
        CHECK(extent.pieces.front().start >= at);
        at = extent.pieces.front().start;
      }
      const Bytes32* before = nullptr;
      for (const attnstore::ContentPiece& piece : extent.pieces) {
        const Known& chunk = known.at(index.key(piece.id));
        CHECK(chunk.domain == domain);
        CHECK(piece.start == at && piece.stop > at && piece.stop <= size);
        CHECK(piece.first >= chunk.native_from);
        CHECK(piece.first + (piece.stop - piece.start) <= chunk.tokens.size());
        CHECK(std::equal(tokens.begin() + piece.start, tokens.begin() + piece.stop,
                         chunk.tokens.begin() + piece.first));
        CHECK(before == nullptr || (piece.first == 0 && chunk.parent == *before));
        before = &index.key(piece.id);
        num_found += piece.stop - piece.start;
        at = piece.stop;
      }
    }
    return num_found;
  }
};

void what_is_found_is_there(std::mt19937_64& random) {
  World world;
  std::uint64_t num_found = 0;
  for (int round = 0; round < 60; ++round) {
    const std::uint32_t alphabet = round % 3 == 0 ? 1 : 2 + round % 5;
    Tokens tokens = world.sequences.empty() ? Tokens() : world.slice(random);
    const Tokens more = draw(1 + random() % 300, alphabet, random);
    tokens.insert(tokens.end(), more.begin(), more.end());
    world.add_sequence(tokens, random);
    CHECK(world.index.size() <= kMaxChunks);
    for (int i = 0; i < 5; ++i) {
      Tokens prompt = world.slice(random);
      const Tokens second = world.slice(random);
      prompt.insert(prompt.end(), second.begin(), second.end());
      num_found += world.ask(prompt, random);
    }
    for (int i = 0; i < 3; ++i) world.index.remove(name(1 + random() % world.num_names));
    if (round == 40) world.index.clear();
  }
  CHECK(num_found > 2000);
  for (std::uint64_t i = 0; i <= world.num_names; ++i) world.index.remove(name(i));
  CHECK(world.index.size() == 0);
}

void impossible_sizes_are_refused() {
  ContentIndex index(kChunk, 1, 1);
  const Tokens tokens(kChunk + 1, 7);
  int refused = 0;
  for (const auto& [count, native_from] : {std::pair{0U, 0U}, {kChunk + 1, 0U}, {3U, 4U}}) {
    try {
      index.add({name(1), name(2), name(0), bytes(tokens), count, native_from, true});
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  CHECK(refused == 3 && index.size() == 0);
}

}  // namespace

int main() {
  std::mt19937_64 random(5);
  rolling_is_hashing_anew(random);
  buckets_are_bounded();
  for (int round = 0; round < 12; ++round) what_is_found_is_there(random);
  impossible_sizes_are_refused();
  std::puts("content index: well");
  return 0;
}
