// SPDX-License-Identifier: Apache-2.0
#include "tests/fake_driver/memory.h"

namespace fake {

bool Memory::add(std::uint64_t address, std::size_t num_bytes, Kind kind) {
  const std::uint64_t end = address + num_bytes;
  if (kind == Kind::kHbm) {
    device_[address] = {end, 0, address, kind};
    return true;
  }
  const std::uint64_t first_page = address / kPageBytes;
  const std::uint64_t last_page = (end - 1) / kPageBytes;
  for (const auto& [start, range] : host_) {
    if (kind == Kind::kShared || range.kind == Kind::kShared) continue;
    if (start / kPageBytes <= last_page && first_page <= (range.end - 1) / kPageBytes) return false;
  }
  std::uint64_t offset = 0;
  if (kind == Kind::kPinned) {
    offset = kDeviceOffset;
    if (is_scattered) offset += ++scattered_ << 20;
  }
  device_[address + offset] = {end + offset, -offset, address, kind};
  host_[address] = {end, 0, address, kind};
  return true;
}

bool Memory::remove(std::uint64_t address, Kind kind) {
  for (auto at = device_.begin(); at != device_.end(); ++at) {
    if (at->second.start_on_host != address || at->second.kind != kind) continue;
    device_.erase(at);
    if (kind != Kind::kHbm) host_.erase(address);
    return true;
  }
  return false;
}

std::size_t Memory::count(Kind kind) const {
  std::size_t count = 0;
  for (const auto& entry : device_) count += entry.second.kind == kind ? 1 : 0;
  return count;
}

std::uint64_t Memory::bytes(Kind kind) const {
  std::uint64_t sum = 0;
  for (const auto& [start, range] : device_) sum += range.kind == kind ? range.end - start : 0;
  return sum;
}

std::uint64_t Memory::device_address(std::uint64_t host) const {
  for (const auto& [start, range] : device_) {
    if (range.kind == Kind::kHbm) continue;
    if (host >= range.start_on_host && host < range.start_on_host + (range.end - start)) {
      return host - range.to_host;
    }
  }
  return 0;
}

Place Memory::find(const Ranges& ranges, std::uint64_t address, std::size_t num_bytes) {
  auto at = ranges.upper_bound(address);
  if (at == ranges.begin()) return {nullptr, Kind::kHbm};
  --at;
  const auto& range = at->second;
  if (address + num_bytes > range.end) return {nullptr, range.kind};
  return {reinterpret_cast<std::byte*>(address + range.to_host), range.kind};
}

Place Memory::for_kernel(std::uint64_t address, std::size_t num_bytes) const {
  const Place place = find(device_, address, num_bytes);
  if (place.memory != nullptr || !is_lenient) return place;
  return {reinterpret_cast<std::byte*>(address), Kind::kHbm};
}

Place Memory::for_copy(std::uint64_t address, std::size_t num_bytes) const {
  Place place = find(device_, address, num_bytes);
  if (place.memory == nullptr) place = find(host_, address, num_bytes);
  if (place.memory != nullptr || !is_lenient) return place;
  return {reinterpret_cast<std::byte*>(address), Kind::kHbm};
}

}  // namespace fake
