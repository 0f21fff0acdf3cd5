// SPDX-License-Identifier: Apache-2.0
// memcpy for bytes that the copying thread does not read again soon.
//
// Stores go past the caches, so that the target's lines are not fetched only to be overwritten:
// a third of the memory traffic less than memcpy, which does this for one large copy but not for
// many of the size of a KV page (measured: docs/design.md).
#pragma once

#include <cstddef>

namespace attnstore {

// The regions do not overlap; any alignment. When it returns, other threads that synchronise with
// this one see the bytes.
void stream_copy(std::byte* target, const std::byte* source, std::size_t num_bytes);

}  // namespace attnstore
