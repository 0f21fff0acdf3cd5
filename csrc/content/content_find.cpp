// SPDX-License-Identifier: Apache-2.0
// How the content index is searched.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "content/content_index.h"

namespace attnstore {

bool ContentIndex::same(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t count) {
  work_.tokens += count;
  return std::memcmp(a, b, count * kTokenBytes) == 0;
}

// The number of leading tokens, of `count`, that both have.
std::uint32_t ContentIndex::common(const std::uint8_t* a, const std::uint8_t* b,
                                   std::uint32_t count) {
  constexpr std::uint32_t kAtOnce = 16;  // a cache line
  if (std::memcmp(a, b, count * kTokenBytes) == 0) return count;
  std::uint32_t at = 0;
  const auto differ = [&](std::uint32_t some) {
    return std::memcmp(a + at * kTokenBytes, b + at * kTokenBytes, some * kTokenBytes) != 0;
  };
  while (count - at >= kAtOnce && !differ(kAtOnce)) at += kAtOnce;
  while (!differ(1)) ++at;  // one of them does
  return at;
}

std::vector<ContentExtent> ContentIndex::find(const ContentQuery& query) {
  work_ = ContentWork();
  std::vector<ContentExtent> cover;
  domain_ = domains_.find(query.domain);
  if (domain_ == kNone || size_ == 0) return cover;
  const std::uint32_t least = std::max(query.min_extent, 1U);
  std::uint32_t at = query.start;
  Walk best;
  while (cover.size() < query.max_extents && at < query.stop && query.stop - at >= least) {
    if (!best_extent(query, at, &best) || best.reach - at < least) break;
    at = best.reach;
    cover.push_back({best.pieces, best.is_exact});
  }
  for (const ContentExtent& extent : cover) {
    for (const ContentPiece& piece : extent.pieces) touch(piece.id);
  }
  return cover;
}

// What reaches from `from` farthest; false if nothing does.
bool ContentIndex::best_extent(const ContentQuery& query, std::uint32_t from, Walk* best) {
  const std::uint32_t window = hash_.window();
  best->pieces.clear();
  best->reach = from;
  tried_.clear();
  seen_.clear();
  hashes_.clear();
  candidates_left_ = kCandidatesMax;
  walks_left_ = kWalksMax;
  if (query.stop - from < window) return false;
  const std::uint64_t salted = salt(domain_);
  const std::uint32_t count = std::min(stride_ + window, query.stop - from - window + 1);
  const std::uint8_t* at = query.tokens + std::size_t{from} * kTokenBytes;
  std::uint64_t rolling = hash_.of(at);
  for (std::uint32_t i = 0; i < count; ++i) {  // all at first, so that their buckets come at once
    hashes_.push_back(mix64(rolling ^ salted));
    anchors_.prefetch(hashes_.back());
    if (i + 1 == count) break;
    rolling = hash_.roll(rolling, at, at + window * kTokenBytes);
    at += kTokenBytes;
  }
  work_.windows += count;
  for (std::uint32_t i = 0; i < count && candidates_left_ > 0 && walks_left_ > 0; ++i) {
    const AnchorTable::Found found = anchors_.find(hashes_[i]);
    if (found.count == 0) continue;
    // Repeated tokens: the same places again, a little farther on.
    if (std::find(seen_.begin(), seen_.end(), hashes_[i]) != seen_.end()) continue;
    seen_.push_back(hashes_[i]);
    look_at(query, from, from + i, found, best);
  }
  return best->reach > from;
}

// Looks at stored places that seem to have the window of the request at token `at`.
void ContentIndex::look_at(const ContentQuery& query, std::uint32_t from, std::uint32_t at,
                           const AnchorTable::Found& found, Walk* best) {
  for (std::size_t i = 0; i < found.count; ++i) {
    const AnchorTable::Place place = found.places[i];
    const Tried tried{place.id, std::int64_t{at} - place.offset};
    if (std::find(tried_.begin(), tried_.end(), tried) != tried_.end()) continue;
    if (candidates_left_ == 0 || walks_left_ == 0) return;
    --candidates_left_;
    ++work_.candidates;
    tried_.push_back(tried);
    if (!walk_back(query, from, at, place)) continue;
    --walks_left_;
    ++work_.walks;
    walk_on(query);
    const bool is_better =
        best->pieces.empty() || std::tie(walk_.reach, walk_.is_exact, walk_.stamp) >
                                    std::tie(best->reach, best->is_exact, best->stamp);
    if (is_better) std::swap(*best, walk_);
  }
}

// Fills walk_ with the pieces from `from` up to `at`, where the chunk's token place.offset is;
// false if the window there or the tokens between differ, or are not native.
bool ContentIndex::walk_back(const ContentQuery& query, std::uint32_t from, std::uint32_t at,
                             AnchorTable::Place place) {
  const auto wanted = [&](std::uint32_t token) {
    return query.tokens + std::size_t{token} * kTokenBytes;
  };
  Id id = place.id;
  std::uint32_t offset = place.offset;
  const std::uint8_t* const window = raw(id).tokens.get() + offset * kTokenBytes;
  if (raw(id).domain != domain_ || !same(window, wanted(at), hash_.window())) return false;
  walk_.pieces.clear();
  while (true) {
    const Chunk& chunk = raw(id);
    const std::uint32_t count = std::min(offset, at - from);
    if (offset - count < chunk.native_from) return false;
    const std::uint8_t* const tokens = chunk.tokens.get() + (offset - count) * kTokenBytes;
    if (!same(tokens, wanted(at - count), count)) return false;
    walk_.pieces.push_back({id, offset - count, at - count, at});
    at -= count;
    if (at == from) break;
    id = find_key(chunk.parent);
    if (id == kNone || raw(id).domain != domain_) return false;
    offset = raw(id).num_tokens;
  }
  std::reverse(walk_.pieces.begin(), walk_.pieces.end());
  return true;
}

// Extends walk_ as far as tokens agree, and notes where it has been.
void ContentIndex::walk_on(const ContentQuery& query) {
  extend(query);
  const std::uint32_t from = walk_.pieces.front().start;
  for (const ContentPiece& piece : walk_.pieces) {
    // A later window may show the same walk by another of its anchors.
    const bool may_be_seen = piece.start < from + stride_ + hash_.window();
    if (may_be_seen) tried_.push_back({piece.id, std::int64_t{piece.start} - piece.first});
  }
}

// Extends walk_ as far as tokens agree: through the rest of its last chunk and its children.
void ContentIndex::extend(const ContentQuery& query) {
  const auto wanted = [&](std::uint32_t token) {
    return query.tokens + std::size_t{token} * kTokenBytes;
  };
  ContentPiece& first = walk_.pieces.back();
  std::uint32_t offset = first.first + (first.stop - first.start);
  const Chunk* chunk = &raw(first.id);
  const std::uint32_t count = std::min(chunk->num_tokens - offset, query.stop - first.stop);
  const std::uint32_t more =
      common(chunk->tokens.get() + offset * kTokenBytes, wanted(first.stop), count);
  work_.tokens += more + 1;
  first.stop += more;
  offset += more;
  std::uint32_t at = first.stop;
  while (offset == chunk->num_tokens && at < query.stop) {
    const Child child = best_child(walk_.pieces.back().id, wanted(at), query.stop - at);
    if (child.id == kNone) break;
    walk_.pieces.push_back({child.id, 0, at, at + child.shared});
    work_.tokens += child.shared;
    at += child.shared;
    offset = child.shared;
    chunk = &raw(child.id);
  }
  walk_.reach = at;
  walk_.stamp = raw(walk_.pieces.front().id).stamp;
  walk_.is_exact = true;
  for (const ContentPiece& piece : walk_.pieces) {
    walk_.is_exact = walk_.is_exact && raw(piece.id).is_exact;
  }
}

}  // namespace attnstore
