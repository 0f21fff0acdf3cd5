// SPDX-License-Identifier: Apache-2.0
// BLAKE3 without a key (https://github.com/BLAKE3-team/BLAKE3-specs): names of chunks, computed
// where no lock of Python's is held. One thread, a block at a time: names form a chain, and each is
// the hash of about a kilobyte. tests/unit/index/test_keys.py compares it with the package blake3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace attnstore {

using Digest = std::array<std::uint8_t, 32>;

// A step of work that has nothing to do with a hash. The blocks of a hash wait for each other,
// which leaves most of a processor idle: a step between two of them costs next to nothing.
using Beside = std::function<void()>;

// Cost: about 1.3 ns a byte.
//
// Args:
//   beside: called between two blocks; may throw. Empty: nothing is done there.
Digest blake3(const std::uint8_t* data, std::size_t size, const Beside& beside = {});

// The same as processors without SSE4.1 do it.
Digest blake3_plain(const std::uint8_t* data, std::size_t size);

}  // namespace attnstore
