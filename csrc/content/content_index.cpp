// SPDX-License-Identifier: Apache-2.0
// What the content index knows: entries, their anchors, and siblings. How it is searched is in
// content_find.cpp.
#include "content/content_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

namespace attnstore {

namespace {

std::uint32_t checked(std::uint32_t chunk_tokens) {
  constexpr std::uint32_t kMost = 65536;  // an anchor's offset has 16 bits
  if (chunk_tokens == 0 || chunk_tokens > kMost) {
    throw std::invalid_argument("chunk_tokens is " + std::to_string(chunk_tokens) +
                                "; it must be 1 to 65536");
  }
  return chunk_tokens;
}

std::size_t checked(std::size_t max_chunks) {
  constexpr std::size_t kMost = 1U << 30;
  if (max_chunks == 0 || max_chunks > kMost) {
    throw std::invalid_argument("max_chunks is " + std::to_string(max_chunks) +
                                "; it must be 1 to 2^30");
  }
  return max_chunks;
}

}  // namespace

ContentIndex::ContentIndex(std::uint32_t chunk_tokens, std::size_t max_chunks, std::uint64_t seed)
    : chunk_tokens_(checked(chunk_tokens)),
      stride_(std::min(kStride, chunk_tokens)),
      max_chunks_(checked(max_chunks)),
      secret_(chunk_tokens, seed, 1),
      seed_(mix64(~seed)),
      hash_(seed, std::min(kWindow, chunk_tokens)),
      anchors_(max_chunks * ((chunk_tokens - 1) / stride_ + 1)),
      keys_(max_chunks + 1),
      groups_(max_chunks + 1) {}

std::size_t ContentIndex::bytes() const {
  std::size_t siblings = siblings_.capacity() * sizeof(Siblings);
  for (const Siblings& some : siblings_) siblings += some.capacity() * sizeof(Id);
  return token_bytes_ + entries_.bytes() + siblings + anchors_.bytes() + keys_.bytes() +
         groups_.bytes();
}

// ---- entries -------------------------------------------------------------------------------

void ContentIndex::link_newest(Id id) {
  Chunk& chunk = raw(id);
  chunk.stamp = ++stamp_;
  chunk.newer = kNone;
  chunk.older = newest_;
  (newest_ == kNone ? oldest_ : raw(newest_).newer) = id;
  newest_ = id;
}

void ContentIndex::unlink(Id id) {
  const Chunk& chunk = raw(id);
  (chunk.newer == kNone ? newest_ : raw(chunk.newer).older) = chunk.older;
  (chunk.older == kNone ? oldest_ : raw(chunk.older).newer) = chunk.newer;
}

void ContentIndex::touch(Id id) {
  unlink(id);
  link_newest(id);
}

std::uint32_t ContentIndex::key_hash(const Bytes32& key) const {
  return static_cast<std::uint32_t>(mix64(load64(key.data() + 8) ^ seed_));
}

Id ContentIndex::find_key(const Bytes32& key) const {
  return IdTable::id_at(keys_.find(key_hash(key), [&](Id id) { return raw(id).key == key; }));
}

// Apart for each tenant: equal windows of two are in different buckets.
std::uint64_t ContentIndex::salt(std::uint32_t domain) const {
  const Bytes32& value = domains_.at(domain);
  return secret_.hash(value.data(), value.size());
}

template <typename Use>
void ContentIndex::each_anchor(Id id, const Use& use) {
  const Chunk& chunk = raw(id);
  const std::uint64_t salted = salt(chunk.domain);
  std::uint32_t offset = chunk.native_from;
  while (offset + hash_.window() <= chunk.num_tokens) {
    const std::uint8_t* const tokens = chunk.tokens.get() + offset * kTokenBytes;
    use(mix64(hash_.of(tokens) ^ salted), AnchorTable::Place{id, offset});
    offset = (offset / stride_ + 1) * stride_;
  }
}

void ContentIndex::add(const ContentName& name) {
  if (name.num_tokens == 0 || name.num_tokens > chunk_tokens_) {
    throw std::invalid_argument(std::to_string(name.num_tokens) + " tokens, but a chunk has 1 to " +
                                std::to_string(chunk_tokens_));
  }
  if (name.native_from > name.num_tokens) {
    throw std::invalid_argument("native from " + std::to_string(name.native_from) + " of " +
                                std::to_string(name.num_tokens) + " tokens");
  }
  remove(name.key);
  if (size_ == max_chunks_) remove(oldest_);
  const std::size_t num_bytes = name.num_tokens * kTokenBytes;
  std::unique_ptr<std::uint8_t[]> tokens(new std::uint8_t[num_bytes]);
  std::memcpy(tokens.get(), name.tokens, num_bytes);
  const Id id = entries_.take();
  Chunk& chunk = raw(id);
  chunk.key = name.key;
  chunk.parent = name.parent;
  chunk.tokens = std::move(tokens);
  chunk.num_tokens = name.num_tokens;
  chunk.native_from = name.native_from;
  chunk.domain = domains_.acquire(name.domain);
  chunk.is_exact = name.is_exact;
  link_newest(id);
  keys_.insert(key_hash(name.key), id);
  enter_sibling(id);
  each_anchor(id,
              [&](std::uint64_t hash, AnchorTable::Place place) { anchors_.insert(hash, place); });
  token_bytes_ += num_bytes;
  ++size_;
}

std::string_view ContentIndex::tokens(Id id) const {
  const Chunk& chunk = raw(id);
  return {reinterpret_cast<const char*>(chunk.tokens.get()), chunk.num_tokens * kTokenBytes};
}

bool ContentIndex::remove(const Bytes32& key) {
  const Id id = find_key(key);
  if (id != kNone) remove(id);
  return id != kNone;
}

void ContentIndex::remove(Id id) {
  Chunk& chunk = raw(id);
  each_anchor(id,
              [&](std::uint64_t hash, AnchorTable::Place place) { anchors_.erase(hash, place); });
  leave_siblings(id);
  keys_.erase(keys_.find(key_hash(chunk.key), [&](Id other) { return other == id; }));
  unlink(id);
  domains_.release(chunk.domain);
  token_bytes_ -= chunk.num_tokens * kTokenBytes;
  chunk.tokens.reset();
  entries_.give_back(id);
  --size_;
}

void ContentIndex::clear() {
  entries_.clear();
  newest_ = oldest_ = kNone;
  size_ = token_bytes_ = 0;
  anchors_.clear();
  keys_.clear();
  groups_.clear();
  siblings_.clear();
  free_siblings_.clear();
  domains_ = SharedValues();
}

// ---- siblings ------------------------------------------------------------------------------

std::uint32_t ContentIndex::group_hash(const Bytes32& parent, std::uint32_t domain) const {
  return static_cast<std::uint32_t>(mix64(load64(parent.data()) ^ mix64(seed_ + domain)));
}

// Where the number of a group of siblings stands; no group is empty.
Id* ContentIndex::find_group(const Bytes32& parent, std::uint32_t domain) const {
  return groups_.find(group_hash(parent, domain), [&](Id group) {
    const Chunk& first = raw(siblings_[group].front());
    return first.domain == domain && first.parent == parent;
  });
}

ContentIndex::Siblings::iterator ContentIndex::place_of(Siblings* siblings,
                                                        const std::uint8_t* tokens,
                                                        std::uint32_t num_tokens,
                                                        const Bytes32& key) {
  return std::partition_point(siblings->begin(), siblings->end(), [&](Id id) {
    ++work_.looks;
    const Chunk& chunk = raw(id);
    const std::uint32_t both = std::min(chunk.num_tokens, num_tokens);
    const int order = std::memcmp(chunk.tokens.get(), tokens, both * kTokenBytes);
    if (order != 0) return order < 0;
    return std::tie(chunk.num_tokens, chunk.key) < std::tie(num_tokens, key);
  });
}

void ContentIndex::enter_sibling(Id id) {
  const Chunk& chunk = raw(id);
  if (chunk.native_from > 0) return;  // nothing reaches it from its parent
  const Id* const known = find_group(chunk.parent, chunk.domain);
  if (known != nullptr) {
    Siblings& siblings = siblings_[IdTable::id_at(known)];
    if (siblings.size() == kSiblingsMax) return;
    siblings.insert(place_of(&siblings, chunk.tokens.get(), chunk.num_tokens, chunk.key), id);
    return;
  }
  Id group = static_cast<Id>(siblings_.size());
  if (free_siblings_.empty()) {
    siblings_.emplace_back();
  } else {
    group = free_siblings_.back();
    free_siblings_.pop_back();
  }
  siblings_[group].push_back(id);
  groups_.insert(group_hash(chunk.parent, chunk.domain), group);
}

void ContentIndex::leave_siblings(Id id) {
  const Chunk& chunk = raw(id);
  Id* const known = chunk.native_from > 0 ? nullptr : find_group(chunk.parent, chunk.domain);
  if (known == nullptr) return;
  const Id group = IdTable::id_at(known);
  Siblings& siblings = siblings_[group];
  const auto found = place_of(&siblings, chunk.tokens.get(), chunk.num_tokens, chunk.key);
  if (found == siblings.end() || *found != id) return;  // there was no room for it
  if (siblings.size() > 1) {
    siblings.erase(found);
    return;
  }
  groups_.erase(known);  // before its last member, by which it is known, has left
  Siblings().swap(siblings);
  free_siblings_.push_back(group);
}

// The child that shares most leading tokens with these; of several first an exact one, then the
// newest.
ContentIndex::Child ContentIndex::best_child(Id parent, const std::uint8_t* tokens,
                                             std::uint32_t num_tokens) {
  Child best;
  const Id* const known = find_group(raw(parent).key, raw(parent).domain);
  if (known == nullptr) return best;
  Siblings& siblings = siblings_[IdTable::id_at(known)];
  // Returns whether those beyond it may share as much as the best.
  const auto look = [&](Id id) {
    ++work_.looks;
    const Chunk& chunk = raw(id);
    const std::uint32_t count = std::min(chunk.num_tokens, num_tokens);
    const std::uint32_t shared = common(chunk.tokens.get(), tokens, count);
    if (shared == 0 || shared < best.shared) return false;
    const bool is_better =
        best.id == kNone || shared > best.shared ||
        std::tie(chunk.is_exact, chunk.stamp) > std::tie(raw(best.id).is_exact, raw(best.id).stamp);
    if (is_better) best = {id, shared};
    return true;
  };
  const std::uint32_t wanted = std::min(num_tokens, chunk_tokens_);
  const auto place =
      siblings.size() == 1 ? siblings.begin() : place_of(&siblings, tokens, wanted, Bytes32{});
  auto after = place;
  for (std::size_t i = 0; i < kNeighbours && after != siblings.end(); ++i, ++after) {
    if (!look(*after)) break;
  }
  auto before = place;
  for (std::size_t i = 0; i < kNeighbours && before != siblings.begin(); ++i) {
    if (!look(*--before)) break;
  }
  return best;
}

}  // namespace attnstore
