// SPDX-License-Identifier: Apache-2.0
#include "index/prefix_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace attnstore {

namespace {

Pieces leading(const Pieces& pieces, std::size_t count) {
  Pieces cut{};
  std::copy_n(pieces.begin(), count, cut.begin());
  return cut;
}

}  // namespace

PrefixIndex::Place PrefixIndex::place_of(const Entry& entry) const {
  return {entry.pieces, sketcher_.whole(entry.num_tokens), entry.rest, entry.key};
}

PrefixIndex::PrefixIndex(std::uint32_t chunk_tokens, std::uint64_t seed, std::size_t expected,
                         std::uint32_t grain)
    : sketcher_(chunk_tokens, seed, grain),
      seed_(mix64(~seed)),
      keys_(expected),
      groups_(expected) {}

// ---- entries -------------------------------------------------------------------------------

const Entry& PrefixIndex::at(Id id) const {
  if (id >= entries_.stop() || raw(id).num_tokens == 0) {
    throw std::out_of_range("no entry " + std::to_string(id));
  }
  return raw(id);
}

Entry& PrefixIndex::at(Id id) { return const_cast<Entry&>(std::as_const(*this).at(id)); }

std::uint64_t PrefixIndex::sequence(Id id) const {
  const bool exists = id < entries_.stop() && raw(id).num_tokens != 0;
  return exists ? raw(id).sequence : 0;
}

std::uint64_t PrefixIndex::priority(const Entry& entry) const {
  return mix64(load64(entry.key.data()) ^ seed_);
}

std::uint32_t PrefixIndex::key_hash(const Bytes32& key) const {
  return static_cast<std::uint32_t>(mix64(load64(key.data() + 8) ^ seed_));
}

std::uint32_t PrefixIndex::group_hash(const Bytes32& parent, std::uint32_t extra) const {
  return static_cast<std::uint32_t>(mix64(load64(parent.data()) ^ mix64(seed_ + extra)));
}

Id* PrefixIndex::find_group(const Bytes32& parent, std::uint32_t extra) const {
  return groups_.find(group_hash(parent, extra), [&](Id root) {
    return raw(root).extra == extra && raw(root).parent == parent;
  });
}

Id PrefixIndex::group_root(const Bytes32& parent, const Bytes32& extra) const {
  const std::uint32_t number = extras_.find(extra);
  return number == kNone ? kNone : IdTable::id_at(find_group(parent, number));
}

Id PrefixIndex::find(const Bytes32& key) const {
  return IdTable::id_at(keys_.find(key_hash(key), [&](Id id) { return raw(id).key == key; }));
}

std::vector<Id> PrefixIndex::ids() const {
  std::vector<Id> all;
  all.reserve(size_);
  for (Id id = 0; id < entries_.stop(); ++id) {
    if (raw(id).num_tokens != 0) all.push_back(id);
  }
  return all;
}

Id PrefixIndex::add(const Name& name) {
  if (name.num_tokens == 0) throw std::invalid_argument("a chunk without tokens");
  if (find(name.key) != kNone) throw std::invalid_argument("the chunk is known already");
  const Id id = add(name, sketcher_.sketch(name.tokens, name.num_tokens));
  raw(id).touched = true;
  return id;
}

Id PrefixIndex::add(const Name& name, const Sketch& sketch) {
  const Id id = entries_.take();
  Entry& entry = raw(id);
  entry = {name.key,
           name.parent,
           sketch.pieces,
           sketch.rest,
           0,
           Checksum{},
           name.position,
           name.num_tokens,
           extras_.acquire(name.extra),
           tenants_.acquire(name.tenant),
           -1,
           kNone,
           kNone,
           false,
           name.is_alone};
  keys_.insert(key_hash(name.key), id);
  Id* const group = find_group(entry.parent, entry.extra);
  if (group == nullptr) {
    groups_.insert(group_hash(entry.parent, entry.extra), id);
  } else {
    IdTable::set(group, insert(IdTable::id_at(group), id));
  }
  ++size_;
  return id;
}

void PrefixIndex::remove(Id id) {
  Entry& entry = at(id);
  keys_.erase(keys_.find(key_hash(entry.key), [&](Id other) { return other == id; }));
  Id* const group = find_group(entry.parent, entry.extra);
  const Id root = erase(IdTable::id_at(group), id);
  if (root == kNone) {
    groups_.erase(group);
  } else {
    IdTable::set(group, root);
  }
  extras_.release(entry.extra);
  tenants_.release(entry.tenant);
  entry.num_tokens = 0;
  entries_.give_back(id);
  --size_;
}

void PrefixIndex::clear() {
  entries_.clear();
  size_ = 0;
  keys_.clear();
  groups_.clear();
  extras_ = SharedValues();
  tenants_ = SharedValues();
}

// ---- siblings ------------------------------------------------------------------------------

void PrefixIndex::split(Id node, const Place& place, Id* below, Id* above) {
  while (node != kNone) {
    Entry& entry = raw(node);
    if (place_of(entry) < place) {
      *below = node;
      below = &entry.right;
      node = entry.right;
    } else {
      *above = node;
      above = &entry.left;
      node = entry.left;
    }
  }
  *below = *above = kNone;
}

Id PrefixIndex::merge(Id below, Id above) {
  Id root = kNone;
  Id* link = &root;
  while (below != kNone && above != kNone) {
    if (priority(raw(below)) >= priority(raw(above))) {
      *link = below;
      link = &raw(below).right;
      below = *link;
    } else {
      *link = above;
      link = &raw(above).left;
      above = *link;
    }
  }
  *link = below != kNone ? below : above;
  return root;
}

Id PrefixIndex::insert(Id root, Id id) {
  Entry& entry = raw(id);
  const Place place = place_of(entry);
  Id* link = &root;
  while (*link != kNone && priority(raw(*link)) >= priority(entry)) {
    Entry& node = raw(*link);
    link = place_of(node) < place ? &node.right : &node.left;
  }
  split(*link, place, &entry.left, &entry.right);
  *link = id;
  return root;
}

Id PrefixIndex::erase(Id root, Id id) {
  const Place place = place_of(raw(id));
  Id* link = &root;
  while (*link != id) {
    Entry& node = raw(*link);
    link = place_of(node) < place ? &node.right : &node.left;
  }
  *link = merge(raw(id).left, raw(id).right);
  return root;
}

Id PrefixIndex::first_from(Id root, const Place& place) const {
  Id found = kNone;
  while (root != kNone) {
    const Entry& node = raw(root);
    const bool before = place_of(node) < place;
    if (!before) found = root;
    root = before ? node.right : node.left;
  }
  return found;
}

Id PrefixIndex::last_before(Id root, const Place& place) const {
  Id found = kNone;
  while (root != kNone) {
    const Entry& node = raw(root);
    const bool before = place_of(node) < place;
    if (before) found = root;
    root = before ? node.right : node.left;
  }
  return found;
}

// Depth of recursion: that of the treap, some 2 ln(n).
void PrefixIndex::collect_from(Id node, const Place& place, std::size_t max,
                               std::vector<Id>* found) const {
  if (node == kNone || found->size() >= max) return;
  const Entry& entry = raw(node);
  if (!(place_of(entry) < place)) {
    collect_from(entry.left, place, max, found);
    if (found->size() < max) found->push_back(node);
  }
  collect_from(entry.right, place, max, found);
}

void PrefixIndex::collect_before(Id node, const Place& place, std::size_t max,
                                 std::vector<Id>* found) const {
  if (node == kNone || found->size() >= max) return;
  const Entry& entry = raw(node);
  if (place_of(entry) < place) {
    collect_before(entry.right, place, max, found);
    if (found->size() < max) found->push_back(node);
  }
  collect_before(entry.left, place, max, found);
}

std::vector<Id> PrefixIndex::heads_of(const Bytes32& parent, const Bytes32& extra,
                                      const std::uint8_t* tokens, std::uint32_t num_tokens,
                                      std::size_t look_max) const {
  std::vector<Id> found;
  const Id root = group_root(parent, extra);
  if (root == kNone) return found;
  const Sketch wanted = sketcher_.sketch(tokens, num_tokens);
  const std::uint32_t size = sketcher_.piece_tokens();
  std::vector<Id> twins;
  for (std::uint32_t count = wanted.num_pieces + 1; count-- > 0;) {
    const Pieces pieces = leading(wanted.pieces, count);
    std::uint32_t below = std::min(wanted.whole_tokens, (count + 1) * size - 1) + 1;
    while (below > 0 && look_max > 0) {
      const Id last = last_before(root, {pieces, below, 0, {}});
      if (last == kNone || raw(last).pieces != pieces) break;
      const std::uint32_t length = sketcher_.whole(raw(last).num_tokens);
      const std::uint64_t rest = sketcher_.rest(tokens, length);
      twins.clear();
      collect_from(root, {pieces, length, rest, {}}, kTwins, &twins);
      for (const Id twin : twins) {
        const Place place = place_of(raw(twin));
        if (place.pieces != pieces || place.whole_tokens != length || place.rest != rest) break;
        found.push_back(twin);
      }
      --look_max;
      below = length;
    }
  }
  return found;
}

std::vector<Neighbour> PrefixIndex::around(const Bytes32& parent, const Bytes32& extra,
                                           const std::uint8_t* tokens, std::uint32_t num_tokens,
                                           std::size_t count_max) const {
  std::vector<Neighbour> found;
  const Id root = group_root(parent, extra);
  if (root == kNone) return found;
  const Sketch wanted = sketcher_.sketch(tokens, num_tokens);
  const Place place{wanted.pieces, 0, 0, {}};
  std::vector<Id> after;
  std::vector<Id> before;
  collect_from(root, place, count_max, &after);
  collect_before(root, place, count_max, &before);
  for (const std::vector<Id>* const side : {&after, &before}) {
    for (const Id id : *side) {
      found.push_back({id, shared_pieces(raw(id).pieces, wanted.pieces)});
    }
  }
  return found;
}

}  // namespace attnstore
