// SPDX-License-Identifier: Apache-2.0
// What is stored of a request anywhere in it, with gaps: documents in another place or order.
//
//   request    ....==========.......========......==========....      stop
//                  document 3       document 1    document 2
//
// Every window of the request is hashed and looked for. What is found is compared token by token,
// back and on through its chain, as far as both agree: a run. Of runs that overlap the longest is
// taken, and the others lose what it covers.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "content/content_index.h"

namespace attnstore {

std::vector<ContentExtent> ContentIndex::find_all(const ContentQuery& query) {
  work_ = ContentWork();
  domain_ = domains_.find(query.domain);
  const std::uint32_t least = std::max(query.min_extent, 1U);
  const std::uint32_t window = hash_.window();
  if (domain_ == kNone || size_ == 0 || query.stop - query.start < std::max(least, window)) {
    return {};
  }
  std::vector<Walk> runs;
  walked_.clear();
  const std::uint64_t salted = salt(domain_);
  const std::uint32_t end = query.stop - window + 1;
  const std::uint8_t* at = query.tokens + std::size_t{query.start} * kTokenBytes;
  std::uint64_t rolling = hash_.of(at);
  for (std::uint32_t from = query.start; from < end; from += kBatch) {
    const std::uint32_t count = std::min<std::uint32_t>(kBatch, end - from);
    hashes_.clear();
    for (std::uint32_t i = 0; i < count; ++i) {  // all at first, so that their buckets come at once
      hashes_.push_back(mix64(rolling ^ salted));
      anchors_.prefetch(hashes_.back());
      if (from + i + 1 == end) break;
      rolling = hash_.roll(rolling, at, at + window * kTokenBytes);
      at += kTokenBytes;
    }
    work_.windows += count;
    candidates_left_ = kCandidatesMax;
    walks_left_ = kWalksMax;
    for (std::uint32_t i = 0; i < count; ++i) {
      const AnchorTable::Found found = anchors_.find(hashes_[i]);
      for (std::size_t n = 0; n < found.count; ++n)
        try_run(query, from + i, found.places[n], &runs);
    }
  }
  return longest_first(query, &runs);
}

// Adds the run that has the window of the request at token `at` in this place, if it is new.
void ContentIndex::try_run(const ContentQuery& query, std::uint32_t at, AnchorTable::Place place,
                           std::vector<Walk>* runs) {
  const Tried tried{place.id, std::int64_t{at} - place.offset};
  if (walked_.count(tried) != 0) return;
  // Compared tokens run ahead of those that were hashed by one run at most.
  const bool is_over = work_.tokens > kComparedMax * work_.windows;
  if (is_over || candidates_left_ == 0 || walks_left_ == 0) return;
  --candidates_left_;
  ++work_.candidates;
  if (!run_back(query, at, place)) return;
  --walks_left_;
  ++work_.walks;
  extend(query);
  for (const ContentPiece& piece : walk_.pieces) {
    walked_.insert({piece.id, std::int64_t{piece.start} - piece.first});
  }
  if (walk_.reach - walk_.pieces.front().start >= std::max(query.min_extent, 1U)) {
    runs->push_back(walk_);
  }
}

// Fills walk_ with the pieces up to token `at`, where the chunk's token place.offset is, from as
// far back as tokens agree and are native; false if the window there differs.
bool ContentIndex::run_back(const ContentQuery& query, std::uint32_t at, AnchorTable::Place place) {
  const auto wanted = [&](std::uint32_t token) {
    return query.tokens + std::size_t{token} * kTokenBytes;
  };
  Id id = place.id;
  std::uint32_t offset = place.offset;
  const std::uint8_t* const first = raw(id).tokens.get() + std::size_t{offset} * kTokenBytes;
  if (raw(id).domain != domain_ || !same(first, wanted(at), hash_.window())) return false;
  walk_.pieces.clear();
  while (true) {
    const Chunk& chunk = raw(id);
    const std::uint32_t most = std::min(offset - chunk.native_from, at - query.start);
    std::uint32_t count = 0;
    while (count < most && std::memcmp(chunk.tokens.get() + (offset - count - 1) * kTokenBytes,
                                       wanted(at - count - 1), kTokenBytes) == 0) {
      ++count;
    }
    work_.tokens += count + 1;
    if (count > 0 || walk_.pieces.empty()) {
      walk_.pieces.push_back({id, offset - count, at - count, at});
    }
    at -= count;
    if (count < offset || at == query.start) break;
    id = find_key(chunk.parent);
    if (id == kNone || raw(id).domain != domain_) break;
    offset = raw(id).num_tokens;
    if (offset < raw(id).native_from) break;
  }
  std::reverse(walk_.pieces.begin(), walk_.pieces.end());
  return true;
}

// What is left of the runs beside `taken`: of each at most two parts, none shorter than `least`.
void ContentIndex::cut_out(const Left& taken, std::uint32_t least, std::vector<Left>* left) {
  std::vector<Left> kept;
  for (const Left& some : *left) {
    const Left before{some.start, std::min(some.stop, std::max(taken.start, some.start)), some.run};
    const Left after{std::max(some.start, std::min(taken.stop, some.stop)), some.stop, some.run};
    const bool is_apart = some.stop <= taken.start || taken.stop <= some.start;
    for (const Left& part : is_apart ? std::vector<Left>{some} : std::vector<Left>{before, after}) {
      if (part.stop - part.start >= least) kept.push_back(part);
    }
  }
  left->swap(kept);
}

// Of runs that overlap the longest is taken, of equal ones an exact one, then the newest.
std::vector<ContentExtent> ContentIndex::longest_first(const ContentQuery& query,
                                                       std::vector<Walk>* runs) {
  std::vector<Left> left;
  left.reserve(runs->size());
  for (const Walk& run : *runs) left.push_back({run.pieces.front().start, run.reach, &run});
  const auto order = [](const Left& some) {
    return std::make_tuple(some.stop - some.start, some.run->is_exact, some.run->stamp);
  };
  std::vector<ContentExtent> taken;
  while (taken.size() < query.max_extents && !left.empty()) {
    const Left best =
        *std::max_element(left.begin(), left.end(),
                          [&](const Left& a, const Left& b) { return order(a) < order(b); });
    taken.push_back(part_of(*best.run, best.start, best.stop));
    cut_out(best, std::max(query.min_extent, 1U), &left);
  }
  std::sort(taken.begin(), taken.end(), [](const ContentExtent& a, const ContentExtent& b) {
    return a.pieces.front().start < b.pieces.front().start;
  });
  for (const ContentExtent& extent : taken) {
    for (const ContentPiece& piece : extent.pieces) touch(piece.id);
  }
  return taken;
}

// Of a run the pieces with tokens [start, stop) of the request.
ContentExtent ContentIndex::part_of(const Walk& run, std::uint32_t start,
                                    std::uint32_t stop) const {
  ContentExtent part;
  part.is_exact = true;
  for (ContentPiece piece : run.pieces) {
    if (piece.stop <= start || piece.start >= stop) continue;
    const std::uint32_t skipped = start > piece.start ? start - piece.start : 0;
    piece.first += skipped;
    piece.start += skipped;
    piece.stop = std::min(piece.stop, stop);
    part.pieces.push_back(piece);
    part.is_exact = part.is_exact && raw(piece.id).is_exact;
  }
  return part;
}

}  // namespace attnstore
