// SPDX-License-Identifier: Apache-2.0
// Where the fields of a record's header page are that recovery reads, in bytes. The format is
// defined by attnstore_vllm/tiers/nvme/format.py; tests/unit/tiers/nvme/test_format.py holds the
// two together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnstore::record {

constexpr std::size_t kNumTokensAt = 12;
constexpr std::size_t kSequenceAt = 56;
constexpr std::size_t kChecksumAt = 72;
constexpr std::size_t kKeyAt = 120;
constexpr std::size_t kParentAt = 152;
constexpr std::size_t kExtraAt = 184;
constexpr std::size_t kTenantAt = 216;
constexpr std::size_t kPositionAt = 248;
constexpr std::size_t kTokensAt = 264;
constexpr std::size_t kFlagsBeforeEnd = 36;  // so many bytes before the header's end
constexpr std::uint32_t kIsAlone = 1;        // a flag

}  // namespace attnstore::record
