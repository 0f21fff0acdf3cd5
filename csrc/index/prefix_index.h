// SPDX-License-Identifier: Apache-2.0
// The names of all chunks that some tier has, in about 230 bytes a chunk and without their tokens.
//
//   key -> entry               a flat hash table
//   (parent, extra) -> root    another; the chunks after one prefix, siblings, are a treap in the
//                              order of their sketches, so that none of their number can make an
//                              insertion or a look-up slow
//
// An entry's id is its place, and is given to another chunk after remove(). Not thread-safe: the
// store's lock covers it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "index/prefix_index_sketch.h"
#include "index/prefix_index_tables.h"
#include "io/checksum.h"

namespace attnstore {

struct Entry {
  Bytes32 key;
  Bytes32 parent;
  Pieces pieces;
  std::uint64_t rest;
  std::uint64_t sequence;  // of its record where recovery found it, zero otherwise
  Checksum checksum;       // of its payload, while slot >= 0
  std::uint32_t position;
  std::uint32_t num_tokens;  // zero: the entry is free
  std::uint32_t extra;
  std::uint32_t tenant;
  std::int32_t slot;  // on NVMe, or -1
  Id left;
  Id right;
  bool touched;   // a caller knows it, so that recovery must leave it alone
  bool is_alone;  // see Name
};

struct Name {
  Bytes32 key;
  Bytes32 parent;
  Bytes32 extra;  // zero: none
  Bytes32 tenant;
  std::uint32_t position;
  std::uint32_t num_tokens;
  const std::uint8_t* tokens;  // big-endian
  bool is_alone;  // it is of use at its own length alone, so none takes another's place
};

constexpr std::size_t kTwins = 4;

struct Neighbour {
  Id id;
  std::uint32_t num_pieces;  // leading ones that it shares
};

// What adopt() did. First the slots are bound, then some of them may be free again.
struct Adoption {
  std::vector<std::uint32_t> bound_slots;
  std::vector<Id> bound_ids;
  std::vector<std::uint32_t> freed_slots;
  std::uint32_t num_entered = 0;
  std::uint32_t num_left_out = 0;
  std::uint32_t num_superseded = 0;  // tails of this or an earlier batch
};

class PrefixIndex {
 public:
  PrefixIndex(std::uint32_t chunk_tokens, std::uint64_t seed, std::size_t expected,
              std::uint32_t grain);

  std::size_t size() const { return size_; }
  const Sketcher& sketcher() const { return sketcher_; }
  const Bytes32& extra(const Entry& entry) const { return extras_.at(entry.extra); }
  const Bytes32& tenant(const Entry& entry) const { return tenants_.at(entry.tenant); }

  // Throws std::out_of_range for an id that is not in use.
  const Entry& at(Id id) const;
  Entry& at(Id id);
  // The entry's, or 0 if there is none.
  std::uint64_t sequence(Id id) const;
  Id find(const Bytes32& key) const;
  std::vector<Id> ids() const;

  // Throws std::invalid_argument if the key is known, or the number of tokens is impossible.
  Id add(const Name& name);
  void remove(Id id);
  void clear();

  // The children of (parent, extra) whose whole blocks begin `tokens`, by their hashes: those with
  // most blocks first. Looks at no more than `look_max` different numbers of blocks, and returns
  // no more than kTwins of one number.
  std::vector<Id> heads_of(const Bytes32& parent, const Bytes32& extra, const std::uint8_t* tokens,
                           std::uint32_t num_tokens, std::size_t look_max) const;

  // The children of (parent, extra) on both sides of the place of `tokens`, nearest first,
  // `count_max` on each side.
  std::vector<Neighbour> around(const Bytes32& parent, const Bytes32& extra,
                                const std::uint8_t* tokens, std::uint32_t num_tokens,
                                std::size_t count_max) const;

  // Enters records by their headers, which are valid, whole and of format version 2. Leaves out
  // those whose key is known, unless it is known from an older record; and of tails and the
  // longer chunks that hold their whole blocks keeps the longer, unless they are alone. What it
  // cannot tell it keeps.
  // Throws std::invalid_argument, and has entered nothing, for a header of impossible sizes.
  Adoption adopt(const std::uint8_t* headers, std::size_t num_headers, std::size_t header_bytes,
                 const std::uint32_t* slots);

 private:
  // Where an entry stands among its siblings.
  struct Place {
    Pieces pieces;
    std::uint32_t whole_tokens;
    std::uint64_t rest;
    Bytes32 key;

    bool operator<(const Place& other) const {
      return std::tie(pieces, whole_tokens, rest, key) <
             std::tie(other.pieces, other.whole_tokens, other.rest, other.key);
    }
  };
  Place place_of(const Entry& entry) const;

  Entry& raw(Id id) const { return entries_[id]; }
  std::uint64_t priority(const Entry& entry) const;
  std::uint32_t key_hash(const Bytes32& key) const;
  std::uint32_t group_hash(const Bytes32& parent, std::uint32_t extra) const;
  Id* find_group(const Bytes32& parent, std::uint32_t extra) const;
  Id group_root(const Bytes32& parent, const Bytes32& extra) const;

  void split(Id node, const Place& place, Id* below, Id* above);
  Id merge(Id below, Id above);
  Id insert(Id root, Id id);
  Id erase(Id root, Id id);
  Id first_from(Id root, const Place& place) const;
  Id last_before(Id root, const Place& place) const;
  void collect_from(Id node, const Place& place, std::size_t max, std::vector<Id>* found) const;
  void collect_before(Id node, const Place& place, std::size_t max, std::vector<Id>* found) const;
  bool is_extended(const Name& name, const Sketch& sketch) const;
  Id add(const Name& name, const Sketch& sketch);
  void adopt_one(const Name& name, const std::uint8_t* header, std::uint32_t slot, Adoption* done);

  const Sketcher sketcher_;
  const std::uint64_t seed_;
  Entries<Entry, &Entry::left> entries_;
  std::size_t size_ = 0;
  IdTable keys_;
  IdTable groups_;
  SharedValues extras_;
  SharedValues tenants_;
};

}  // namespace attnstore
