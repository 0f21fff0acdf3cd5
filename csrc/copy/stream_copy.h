// SPDX-License-Identifier: Apache-2.0
// memcpy for bytes that the copying thread does not read again soon.
//
// Stores go past the caches, so that the target's lines are not fetched only to be overwritten:
// a third of the memory traffic less than memcpy, which does this for one large copy but not for
// many of the size of a KV page (measured: docs/notes/2026-11-copies.md).
#pragma once

#include <cstddef>

namespace attnstore {

// The regions do not overlap; any alignment.
void stream_copy(std::byte* target, const std::byte* source, std::size_t num_bytes);

// Called by a thread after its last stream_copy(): other threads that synchronise with it from then
// on see the bytes. It waits until they have left the processor, so not once a KV page.
void end_stream_copies();

}  // namespace attnstore
