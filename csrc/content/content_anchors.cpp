// SPDX-License-Identifier: Apache-2.0
#include "content/content_anchors.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "index/prefix_index_sketch.h"

namespace attnstore {

namespace {

constexpr std::uint64_t kModulus = (std::uint64_t{1} << 61) - 1;
constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kBucketsMax = std::size_t{1} << 32;

// Both below the modulus, and so is the product.
std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  const std::uint64_t sum =
      (static_cast<std::uint64_t>(product) & kModulus) + static_cast<std::uint64_t>(product >> 61);
  return sum >= kModulus ? sum - kModulus : sum;
}

std::uint64_t add(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t sum = a + b;
  return sum >= kModulus ? sum - kModulus : sum;
}

std::uint64_t token(const std::uint8_t* at) {
  std::uint32_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::uint64_t secret_base(std::uint64_t seed) {
  constexpr std::uint64_t kLeast = std::uint64_t{1} << 32;  // beyond any token
  return kLeast + mix64(mix64(seed) + 0x9e3779b97f4a7c15ULL) % (kModulus - kLeast);
}

std::uint64_t power(std::uint64_t base, std::uint32_t exponent) {
  std::uint64_t result = 1;
  while (exponent-- > 0) result = multiply(result, base);
  return result;
}

std::size_t bucket_count(std::size_t expected) {
  const std::size_t count = expected / AnchorTable::kMean + 1;
  if (count >= kBucketsMax) throw std::invalid_argument("too many anchors");
  return count;
}

}  // namespace

WindowHash::WindowHash(std::uint64_t seed, std::uint32_t window)
    : window_(window), base_(secret_base(seed)), leaving_factor_(power(base_, window)) {}

std::uint64_t WindowHash::of(const std::uint8_t* tokens) const {
  std::uint64_t hash = 0;
  for (std::uint32_t i = 0; i < window_; ++i) {
    hash = add(multiply(hash, base_), token(tokens + i * kTokenBytes));
  }
  return hash;
}

std::uint64_t WindowHash::roll(std::uint64_t hash, const std::uint8_t* leaving,
                               const std::uint8_t* entering) const {
  const std::uint64_t next = add(multiply(hash, base_), token(entering));
  return add(next, kModulus - multiply(token(leaving), leaving_factor_));
}

AnchorTable::AnchorTable(std::size_t expected) : count_(bucket_count(expected)) { clear(); }

void AnchorTable::clear() {
  memory_.reset(std::calloc(count_ + 1, sizeof(Bucket)));  // costs nothing before it is used
  if (memory_ == nullptr) throw std::bad_alloc();
  static_assert(sizeof(Bucket) == kLineBytes);
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  const std::size_t skew = (kLineBytes - address % kLineBytes) % kLineBytes;
  buckets_ = reinterpret_cast<Bucket*>(static_cast<char*>(memory_.get()) + skew);
}

void AnchorTable::insert(std::uint64_t hash, Place place) {
  Bucket& slots = bucket(hash);
  std::size_t victim = kSlots - 1;
  std::size_t num_equal = 0;
  for (std::size_t i = 0; i < kSlots; ++i) {
    if (slots[i].id_plus_1 == 0) {
      victim = i;
      break;
    }
    if (slots[i].tag == tag(hash) && ++num_equal == kEqualMax) {
      victim = i;
      break;
    }
  }
  std::copy_backward(slots.begin(), slots.begin() + victim, slots.begin() + victim + 1);
  slots[0] = {place.id + 1, static_cast<std::uint16_t>(place.offset), tag(hash)};
}

void AnchorTable::erase(std::uint64_t hash, Place place) {
  Bucket& slots = bucket(hash);
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const Slot& slot) {
    return slot.id_plus_1 == place.id + 1 && slot.offset == place.offset;
  });
  if (found == slots.end()) return;
  std::copy(found + 1, slots.end(), found);
  slots.back() = {0, 0, 0};
}

AnchorTable::Found AnchorTable::find(std::uint64_t hash) const {
  Found found;
  for (const Slot& slot : bucket(hash)) {
    if (slot.id_plus_1 == 0) break;
    if (slot.tag == tag(hash)) found.places[found.count++] = {slot.id_plus_1 - 1, slot.offset};
  }
  return found;
}

}  // namespace attnstore
