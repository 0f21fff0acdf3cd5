// SPDX-License-Identifier: Apache-2.0
#include "copy/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attnstore {

namespace {

constexpr std::size_t kLine = 64;

using CopyLines = void (*)(std::byte*, const std::byte*, std::size_t);

void copy_lines_plain(std::byte* target, const std::byte* source, std::size_t lines) {
  std::memcpy(target, source, lines * kLine);
}

#if defined(__x86_64__)
// `target` is aligned to a line in both.

__attribute__((target("avx512f"))) void copy_lines_avx512(std::byte* target,
                                                          const std::byte* source,
                                                          std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, target += kLine, source += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
  }
}

__attribute__((target("avx2"))) void copy_lines_avx2(std::byte* target, const std::byte* source,
                                                     std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, target += kLine, source += kLine) {
    const auto* from = reinterpret_cast<const __m256i*>(source);
    auto* to = reinterpret_cast<__m256i*>(target);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  }
}
#endif

CopyLines choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return copy_lines_avx512;
  if (__builtin_cpu_supports("avx2")) return copy_lines_avx2;
#endif
  return copy_lines_plain;
}

}  // namespace

void stream_copy(std::byte* target, const std::byte* source, std::size_t num_bytes) {
  static const CopyLines copy_lines = choose();
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(target) % kLine;
  const std::size_t head = misaligned == 0 ? 0 : kLine - misaligned;
  if (num_bytes < head + kLine) {
    std::memcpy(target, source, num_bytes);
    return;
  }
  std::memcpy(target, source, head);
  const std::size_t lines = (num_bytes - head) / kLine;
  copy_lines(target + head, source + head, lines);
  const std::size_t done = head + lines * kLine;
  std::memcpy(target + done, source + done, num_bytes - done);
}

void end_stream_copies() {
#if defined(__x86_64__)
  _mm_sfence();  // streaming stores are weakly ordered: they are complete before anyone is told
#endif
}

}  // namespace attnstore
