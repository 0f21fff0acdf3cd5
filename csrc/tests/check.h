// SPDX-License-Identifier: Apache-2.0
// The little that our native tests need. A failure says where and ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Pages = std::unique_ptr<std::byte[], Free>;

inline Pages pages(std::size_t num_bytes) {
  constexpr std::size_t kPage = 4096;
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, num_bytes));
  CHECK(memory != nullptr);
  return Pages(memory);
}

inline void fill(std::byte* memory, std::size_t num_bytes, std::mt19937_64& random) {
  for (std::size_t i = 0; i < num_bytes; ++i) memory[i] = static_cast<std::byte>(random());
}
