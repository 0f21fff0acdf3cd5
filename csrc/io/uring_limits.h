// SPDX-License-Identifier: Apache-2.0
// What the ring's thread keeps to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnstore {

constexpr std::uint64_t kAlignment = 4096;
// More at once would leave the disk idle meanwhile: 26 made 4 KiB reads 1.16 times slower.
constexpr unsigned kSubmitMax = 4;
constexpr unsigned kReapMax = 8;  // what takes their places is begun before the next are looked at
constexpr int kRetriesMax = 64;   // of one piece, when the kernel says EAGAIN or EINTR
constexpr int kWaitRetriesMax = 10000;  // of one wait, a tenth of a millisecond apart
// Below this a hand-over to another thread and back costs more than the checksum itself.
constexpr std::size_t kHashHereBytes = 64 * 1024;
constexpr std::uint64_t kRegionBytesMax = std::uint64_t{1} << 30;  // the kernel's limit for one
constexpr std::size_t kRegionsMax = 16384;

}  // namespace attnstore
