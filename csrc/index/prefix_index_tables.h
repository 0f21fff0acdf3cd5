// SPDX-License-Identifier: Apache-2.0
// Small containers of the indexes: entries by id, a flat hash table of ids, and 32-byte values that
// many entries share, counted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace attnstore {

using Id = std::uint32_t;
using Bytes32 = std::array<std::uint8_t, 32>;
constexpr Id kNone = 0xffffffff;

inline std::uint64_t load64(const std::uint8_t* from) {
  std::uint64_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Entries in blocks that never move; an id is an entry's place, and is given out again after
// give_back(). `kNextFree` is a member that means nothing else while an entry is free.
template <typename Entry, Id Entry::* kNextFree>
class Entries {
 public:
  Entry& operator[](Id id) const { return blocks_[id / kBlock][id % kBlock]; }
  // Ids below it have a place, in use or free.
  std::size_t stop() const { return blocks_.size() * kBlock; }
  std::size_t bytes() const { return stop() * sizeof(Entry); }

  Id take() {
    if (first_free_ == kNone) {
      const Id first = static_cast<Id>(stop());
      blocks_.push_back(std::make_unique<Entry[]>(kBlock));
      for (Id id = first + kBlock; id-- > first;) give_back(id);
    }
    const Id id = first_free_;
    first_free_ = (*this)[id].*kNextFree;
    return id;
  }

  void give_back(Id id) {
    (*this)[id].*kNextFree = first_free_;
    first_free_ = id;
  }

  void clear() {
    blocks_.clear();
    first_free_ = kNone;
  }

 private:
  static constexpr Id kBlock = 4096;
  std::vector<std::unique_ptr<Entry[]>> blocks_;
  Id first_free_ = kNone;
};

// Ids by a 32-bit hash, with linear probing. The caller knows what is equal. Cells come from
// calloc, so that a table with room for much costs nothing before it is used.
class IdTable {
 public:
  explicit IdTable(std::size_t expected) {
    std::size_t size = 64;
    while (size / 10 * 7 < expected) size *= 2;
    allocate(size);
  }

  // Where the id stands for which `equal` is true, or nullptr. Valid until the next change.
  template <typename Equal>
  Id* find(std::uint32_t hash, const Equal& equal) const {
    for (std::size_t at = hash & mask_; cells_[at].id_plus_1 != 0; at = (at + 1) & mask_) {
      if (cells_[at].hash == hash && equal(cells_[at].id_plus_1 - 1)) return &cells_[at].id_plus_1;
    }
    return nullptr;
  }

  static Id id_at(const Id* found) { return found == nullptr ? kNone : *found - 1; }
  static void set(Id* found, Id id) { *found = id + 1; }

  void insert(std::uint32_t hash, Id id) {
    if (size_ + 1 > (mask_ + 1) / 10 * 7) grow();
    put({hash, id + 1});
    ++size_;
  }

  // `found` is of find(). Moves back what had moved on because of it.
  void erase(Id* found) {
    std::size_t hole = static_cast<std::size_t>(
        reinterpret_cast<Cell*>(reinterpret_cast<char*>(found) - offsetof(Cell, id_plus_1)) -
        cells_.get());
    for (std::size_t at = (hole + 1) & mask_; cells_[at].id_plus_1 != 0; at = (at + 1) & mask_) {
      const std::size_t home = cells_[at].hash & mask_;
      if (((at - home) & mask_) >= ((at - hole) & mask_)) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = {0, 0};
    --size_;
  }

  void clear() {
    allocate(mask_ + 1);
    size_ = 0;
  }

  std::size_t bytes() const { return (mask_ + 1) * sizeof(Cell); }

 private:
  struct Cell {
    std::uint32_t hash;
    Id id_plus_1;  // zero: empty
  };
  struct Free {
    void operator()(Cell* cells) const { std::free(cells); }
  };

  void allocate(std::size_t size) {
    cells_.reset(static_cast<Cell*>(std::calloc(size, sizeof(Cell))));
    if (cells_ == nullptr) throw std::bad_alloc();
    mask_ = size - 1;
  }

  void put(Cell cell) {
    std::size_t at = cell.hash & mask_;
    while (cells_[at].id_plus_1 != 0) at = (at + 1) & mask_;
    cells_[at] = cell;
  }

  void grow() {
    const std::unique_ptr<Cell[], Free> before = std::move(cells_);
    const std::size_t size = mask_ + 1;
    allocate(2 * size);
    for (std::size_t at = 0; at < size; ++at) {
      if (before[at].id_plus_1 != 0) put(before[at]);
    }
  }

  std::unique_ptr<Cell[], Free> cells_;
  std::size_t mask_ = 0;
  std::size_t size_ = 0;
};

// Values that many entries share, each stored once while some entry has it. All-zero is number 0.
class SharedValues {
 public:
  SharedValues() : values_(1, {Bytes32{}, 1}) {}

  std::uint32_t acquire(const Bytes32& value) {
    if (value == values_[0].first) return 0;
    const auto known = numbers_.find(value);
    if (known != numbers_.end()) {
      ++values_[known->second].second;
      return known->second;
    }
    auto number = static_cast<std::uint32_t>(values_.size());
    if (free_.empty()) {
      values_.push_back({value, 1});
    } else {
      number = free_.back();
      free_.pop_back();
      values_[number] = {value, 1};
    }
    numbers_.emplace(value, number);
    return number;
  }

  void release(std::uint32_t number) {
    if (number == 0 || --values_[number].second > 0) return;
    numbers_.erase(values_[number].first);
    free_.push_back(number);
  }

  // kNone if no entry has it.
  std::uint32_t find(const Bytes32& value) const {
    if (value == values_[0].first) return 0;
    const auto known = numbers_.find(value);
    return known == numbers_.end() ? kNone : known->second;
  }

  const Bytes32& at(std::uint32_t number) const { return values_[number].first; }

 private:
  std::map<Bytes32, std::uint32_t> numbers_;
  std::vector<std::pair<Bytes32, std::uint32_t>> values_;  // with the number of its users
  std::vector<std::uint32_t> free_;
};

}  // namespace attnstore
