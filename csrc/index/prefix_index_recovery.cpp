// SPDX-License-Identifier: Apache-2.0
// PrefixIndex::adopt: entries from the headers that recovery has read and validated.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "index/prefix_index.h"
#include "index/record_header.h"

namespace attnstore {

namespace {

constexpr std::size_t kSupersedeLooks = 32;

std::uint32_t load32(const std::uint8_t* from) {
  std::uint32_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

Bytes32 load_bytes(const std::uint8_t* from) {
  Bytes32 value;
  std::memcpy(value.data(), from, value.size());
  return value;
}

Name name_in(const std::uint8_t* header, std::size_t header_bytes) {
  return {load_bytes(header + record::kKeyAt),
          load_bytes(header + record::kParentAt),
          load_bytes(header + record::kExtraAt),
          load_bytes(header + record::kTenantAt),
          static_cast<std::uint32_t>(load64(header + record::kPositionAt)),
          load32(header + record::kNumTokensAt),
          header + record::kTokensAt,
          (load32(header + header_bytes - record::kFlagsBeforeEnd) & record::kIsAlone) != 0};
}

}  // namespace

bool PrefixIndex::is_extended(const Name& name, const Sketch& sketch) const {
  if (sketch.rest != 0 || name.num_tokens == sketcher_.chunk_tokens()) return false;
  const Id root = group_root(name.parent, name.extra);
  const Id next = first_from(root, {sketch.pieces, sketch.whole_tokens + 1, 0, {}});
  return next != kNone && shared_pieces(raw(next).pieces, sketch.pieces) == sketch.num_pieces;
}

void PrefixIndex::adopt_one(const Name& name, const std::uint8_t* header, std::uint32_t slot,
                            Adoption* done) {
  const std::uint64_t sequence = load64(header + record::kSequenceAt);
  Id id = find(name.key);
  if (id != kNone) {
    const Entry& known = raw(id);
    if (known.touched || known.sequence >= sequence) {
      ++done->num_left_out;
      return;
    }
    done->freed_slots.push_back(static_cast<std::uint32_t>(known.slot));
  } else {
    const Sketch sketch = sketcher_.sketch(name.tokens, name.num_tokens);
    if (!name.is_alone && is_extended(name, sketch)) {
      ++done->num_left_out;
      return;
    }
    for (const Id tail :
         heads_of(name.parent, name.extra, name.tokens, name.num_tokens, kSupersedeLooks)) {
      if (name.is_alone || raw(tail).is_alone || raw(tail).touched) continue;
      done->freed_slots.push_back(static_cast<std::uint32_t>(raw(tail).slot));
      remove(tail);
      ++done->num_superseded;
    }
    id = add(name, sketch);
    ++done->num_entered;
  }
  Entry& entry = raw(id);
  entry.sequence = sequence;
  entry.slot = static_cast<std::int32_t>(slot);
  std::memcpy(entry.checksum.data(), header + record::kChecksumAt, entry.checksum.size());
  done->bound_slots.push_back(slot);
  done->bound_ids.push_back(id);
}

Adoption PrefixIndex::adopt(const std::uint8_t* headers, std::size_t num_headers,
                            std::size_t header_bytes, const std::uint32_t* slots) {
  std::vector<Name> names;
  names.reserve(num_headers);
  for (std::size_t i = 0; i < num_headers; ++i) {
    const std::uint8_t* const header = headers + i * header_bytes;
    if (header_bytes < record::kTokensAt + record::kFlagsBeforeEnd)
      throw std::invalid_argument("a header is too short");
    const Name name = name_in(header, header_bytes);
    const std::size_t room = (header_bytes - record::kTokensAt) / kTokenBytes;
    const bool fits = name.num_tokens > 0 && name.num_tokens <= sketcher_.chunk_tokens() &&
                      name.num_tokens <= room && load64(header + record::kPositionAt) <= 0xffffffff;
    if (!fits) throw std::invalid_argument("a header has impossible sizes");
    names.push_back(name);
  }
  // The short ones first: a longer chunk, whose tokens are at hand then, finds its tails.
  std::vector<std::size_t> order(num_headers);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return names[a].num_tokens < names[b].num_tokens;
  });
  Adoption done;
  for (const std::size_t i : order)
    adopt_one(names[i], headers + i * header_bytes, slots[i], &done);
  return done;
}

}  // namespace attnstore
