// SPDX-License-Identifier: Apache-2.0
// The keys of consecutive chunks, as index/keys.py defines them: each the hash of the one before,
// of what else makes it differ, and of its tokens.
#pragma once

#include <string>
#include <string_view>

#include "index/blake3.h"

namespace attnstore {

struct ChunkText {
  std::string_view extra;   // empty: it has no media
  std::string_view tokens;  // encoded
};

// H("chunk", parent, extra, tokens), the parts framed by their lengths.
//
// Args:
//   scratch: for the text that is hashed.
//   beside: see blake3().
Digest chunk_key(std::string_view parent, const ChunkText& chunk, std::string& scratch,
                 const Beside& beside = {});

}  // namespace attnstore
