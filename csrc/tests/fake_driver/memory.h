// SPDX-License-Identifier: Apache-2.0
// Memory as the fake driver knows it: what the device may read and write, and at which address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace fake {

// Page-locked memory of the host has another address on the device, which no process can have.
// HBM is ordinary memory, and its address is its own.
constexpr std::uint64_t kDeviceOffset = 1ULL << 47;
constexpr std::uint64_t kPageBytes = 4096;

enum class Kind : std::uint8_t {
  kHbm,
  kPinned,  // registered: the device may access it at its device address only
  kShared,  // allocated by the driver: one address for both
};

struct Place {
  std::byte* memory;  // null: nothing may be accessed there
  Kind kind;
};

class Memory {
 public:
  // False if a page of it is registered already, as the real driver has it.
  bool add(std::uint64_t address, std::size_t num_bytes, Kind kind);
  // False if nothing of this kind begins there.
  bool remove(std::uint64_t address, Kind kind);
  [[nodiscard]] std::size_t count(Kind kind) const;
  [[nodiscard]] std::uint64_t bytes(Kind kind) const;

  // Where the device address of registered memory is: the start of a range or anywhere in it; 0 if
  // it is not registered.
  [[nodiscard]] std::uint64_t device_address(std::uint64_t host) const;

  // What a kernel accesses at an address: a word, which lies in one range.
  [[nodiscard]] Place for_kernel(std::uint64_t address, std::size_t num_bytes) const;
  // What a copy accesses: host addresses of page-locked memory as well, and one range only.
  [[nodiscard]] Place for_copy(std::uint64_t address, std::size_t num_bytes) const;

  // Any address is HBM's, for callers that compute with tensors of which this does not know.
  bool is_lenient = false;
  // The device address of each registration is somewhere else, not one behind the other.
  bool is_scattered = false;

 private:
  struct Range {
    std::uint64_t end;
    std::uint64_t to_host;  // is added to an address in the range
    std::uint64_t start_on_host;
    Kind kind;
  };
  using Ranges = std::map<std::uint64_t, Range>;

  [[nodiscard]] static Place find(const Ranges& ranges, std::uint64_t address,
                                  std::size_t num_bytes);

  Ranges device_;  // by address on the device
  Ranges host_;    // of page-locked memory, by address on the host
  std::uint64_t scattered_ = 0;
};

}  // namespace fake
