// SPDX-License-Identifier: Apache-2.0
// Which stored chunks hold the tokens of a request, wherever they stand in it: what is left of a
// prompt that was truncated is found by its content, as rsync finds blocks that have moved.
//
//   chunk      |a . . . |a . . . |a . . . |a . . . |      a: an anchor, the hash of 32 tokens, at
//              0        64       128      192      256       every 64th token
//
//   request    ......p==========================reach....  p: the end of the cover so far
//                    [ 96 windows )                        each hashed and looked for; what is
//                    found
//                    <------- a ----------------->         is compared token by token, back to p
//                                                          and on through chunk and children
//
// The cover is contiguous from its start: of all that reaches back to p what reaches farthest is
// taken, again and again, until nothing does. As a part of what was found could be found too, no
// other choice covers more (but for what min_extent and the limits below leave out).
//
// All token ids are kept here, so nothing is answered that was not compared in memory.
//
// Limits, for any input: of one extent at most 96 windows are hashed, kCandidatesMax places
// compared with the request (the window and what is before it, 127 tokens), and kWalksMax of these
// followed to their ends, none farther than the extent that is taken. So where E extents are found,
// a find() compares at most
//     (E + 1) * (kCandidatesMax * 127 + kWalksMax) + kWalksMax * (tokens covered + min_extent)
// tokens, and takes kWalksMax * (chunks covered + 2 * (E + 1) + min_extent / chunk_tokens) steps
// from a chunk to its child, each of which looks at no more than kLooksMax siblings.
//
// What the limits lose: of windows with the same tokens only the newest kEqualMax are known, so
// what many sequences share may be covered by another than the one that goes on as the request
// does; that one is found where it differs from them. A cover of such parts has more extents, and
// ends where one is shorter than min_extent.
//
// Not thread-safe: the store's lock covers it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "content/content_anchors.h"
#include "index/prefix_index_sketch.h"
#include "index/prefix_index_tables.h"

namespace attnstore {

struct ContentName {
  Bytes32 key;
  Bytes32 parent;
  Bytes32 domain;
  const std::uint8_t* tokens;  // big-endian
  std::uint32_t num_tokens;
  std::uint32_t native_from;  // tokens before this one are compared, and never found
  bool is_exact;
};

// Tokens [start, stop) of a request are those of a chunk from `first` on.
struct ContentPiece {
  Id id;
  std::uint32_t first;
  std::uint32_t start;
  std::uint32_t stop;
};

// A run of pieces, each of the chunk after the one before it: one shift.
struct ContentExtent {
  std::vector<ContentPiece> pieces;
  bool is_exact = false;  // all of them
};

struct ContentQuery {
  Bytes32 domain;
  const std::uint8_t* tokens;  // of the whole request, big-endian
  std::uint32_t start;
  std::uint32_t stop;  // what is beyond it is not looked at
  std::uint32_t min_extent;
  std::size_t max_extents;
};

// What the last find() or find_all() did.
struct ContentWork {
  std::uint64_t windows = 0;     // hashed and looked up
  std::uint64_t candidates = 0;  // places compared with the request
  std::uint64_t walks = 0;       // of these, followed to the end
  std::uint64_t looks = 0;       // at siblings, each a comparison of at most a chunk
  std::uint64_t tokens = 0;      // compared: those before a place, and those that agree after it
};

class ContentIndex {
 public:
  static constexpr std::uint32_t kWindow = 32;  // both are less where chunks are shorter
  static constexpr std::uint32_t kStride = 64;
  static constexpr std::size_t kCandidatesMax = 32;
  static constexpr std::size_t kWalksMax = 8;
  static constexpr std::size_t kSiblingsMax = 4096;  // more are found by their anchors only
  static constexpr std::size_t kNeighbours = 4;
  static constexpr std::uint32_t kBatch = 96;  // windows of find_all() that share limits
  static constexpr std::uint64_t kComparedMax = 16;
  static constexpr std::size_t kLooksMax = 13 + 2 * kNeighbours;  // 2^12 siblings

  // Throws std::invalid_argument for chunk_tokens not in 1 to 65,536, or no room for a chunk.
  ContentIndex(std::uint32_t chunk_tokens, std::size_t max_chunks, std::uint64_t seed);

  std::size_t size() const { return size_; }
  std::size_t bytes() const;
  const ContentWork& work() const { return work_; }
  const Bytes32& key(Id id) const { return raw(id).key; }
  bool is_exact(Id id) const { return raw(id).is_exact; }
  // All tokens of a chunk that find() named, big-endian.
  std::string_view tokens(Id id) const;

  // Enters a chunk, in place of one with its key; when max_chunks are there the one that was added
  // or found longest ago leaves. Throws std::invalid_argument for impossible sizes.
  void add(const ContentName& name);
  bool remove(const Bytes32& key);
  void clear();

  // The longest cover of [start, stop) from `start` on. Its ids are valid until the next change.
  std::vector<ContentExtent> find(const ContentQuery& query);

  // What is stored of [start, stop), with gaps: the longest runs, and what they leave of others,
  // none shorter than min_extent. Its ids are valid until the next change. Compares at most
  // kComparedMax tokens for each window of the request, and the tokens of one run beyond it.
  std::vector<ContentExtent> find_all(const ContentQuery& query);

 private:
  struct Chunk {
    Bytes32 key;
    Bytes32 parent;
    std::unique_ptr<std::uint8_t[]> tokens;
    std::uint64_t stamp;  // grows with each addition and each time it is found
    std::uint32_t num_tokens;
    std::uint32_t native_from;
    std::uint32_t domain;
    Id newer;  // in the order of departure
    Id older;
    bool is_exact;
  };
  // The chunks after one parent that are native from their first token on, in the order of their
  // tokens: the one that shares most leading tokens with others stands beside their place.
  using Siblings = std::vector<Id>;
  struct Child {
    Id id = kNone;
    std::uint32_t shared = 0;
  };
  // What is tried at one point, and the best of it.
  struct Walk {
    std::vector<ContentPiece> pieces;
    std::uint32_t reach = 0;
    std::uint64_t stamp = 0;
    bool is_exact = false;
  };
  // Tokens [start, stop) of a request, of a walk, that no other has.
  struct Left {
    std::uint32_t start;
    std::uint32_t stop;
    const Walk* run;
  };
  struct Tried {
    Id id;
    std::int64_t origin;  // where in the request the chunk's first token would be

    bool operator==(const Tried& other) const { return id == other.id && origin == other.origin; }
  };
  struct TriedHash {
    std::size_t operator()(const Tried& tried) const {
      return mix64(static_cast<std::uint64_t>(tried.origin) * 0x100000001B3ULL ^ tried.id);
    }
  };

  Chunk& raw(Id id) const { return entries_[id]; }
  void link_newest(Id id);
  void unlink(Id id);
  void touch(Id id);
  void remove(Id id);

  std::uint32_t key_hash(const Bytes32& key) const;
  Id find_key(const Bytes32& key) const;
  std::uint64_t salt(std::uint32_t domain) const;
  template <typename Use>
  void each_anchor(Id id, const Use& use);

  std::uint32_t group_hash(const Bytes32& parent, std::uint32_t domain) const;
  Id* find_group(const Bytes32& parent, std::uint32_t domain) const;
  Siblings::iterator place_of(Siblings* siblings, const std::uint8_t* tokens,
                              std::uint32_t num_tokens, const Bytes32& key);
  void enter_sibling(Id id);
  void leave_siblings(Id id);
  Child best_child(Id parent, const std::uint8_t* tokens, std::uint32_t num_tokens);

  static std::uint32_t common(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t count);
  bool same(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t count);
  bool best_extent(const ContentQuery& query, std::uint32_t from, Walk* best);
  void look_at(const ContentQuery& query, std::uint32_t from, std::uint32_t at,
               const AnchorTable::Found& found, Walk* best);
  bool walk_back(const ContentQuery& query, std::uint32_t from, std::uint32_t at,
                 AnchorTable::Place place);
  void walk_on(const ContentQuery& query);
  void extend(const ContentQuery& query);
  void try_run(const ContentQuery& query, std::uint32_t at, AnchorTable::Place place,
               std::vector<Walk>* runs);
  bool run_back(const ContentQuery& query, std::uint32_t at, AnchorTable::Place place);
  std::vector<ContentExtent> longest_first(const ContentQuery& query, std::vector<Walk>* runs);
  static void cut_out(const Left& taken, std::uint32_t least, std::vector<Left>* left);
  ContentExtent part_of(const Walk& run, std::uint32_t start, std::uint32_t stop) const;

  const std::uint32_t chunk_tokens_;
  const std::uint32_t stride_;
  const std::size_t max_chunks_;
  const Sketcher secret_;
  const std::uint64_t seed_;
  const WindowHash hash_;
  AnchorTable anchors_;
  Entries<Chunk, &Chunk::older> entries_;
  Id newest_ = kNone;
  Id oldest_ = kNone;
  std::size_t size_ = 0;
  std::size_t token_bytes_ = 0;
  std::uint64_t stamp_ = 0;
  IdTable keys_;
  IdTable groups_;
  std::vector<Siblings> siblings_;
  std::vector<Id> free_siblings_;
  SharedValues domains_;
  ContentWork work_;
  // Of the find() or find_all() that runs, kept for their memory.
  std::uint32_t domain_ = kNone;
  Walk walk_;
  std::vector<Tried> tried_;
  std::unordered_set<Tried, TriedHash> walked_;
  std::vector<std::uint64_t> hashes_;
  std::vector<std::uint64_t> seen_;
  std::size_t candidates_left_ = 0;
  std::size_t walks_left_ = 0;
};

}  // namespace attnstore
