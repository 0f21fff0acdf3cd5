// SPDX-License-Identifier: Apache-2.0
#include "tests/fake_driver/host_kernels.h"

#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "cuda/copy_words.h"
#include "cuda/rotate_words.h"
#include "tests/fake_driver/state.h"

// ---- memory, as a kernel's threads access it -------------------------------------------

namespace attnstore {

namespace {

template <typename Word>
Word fake_load(std::uint64_t address) {
  fake::Gpu& gpu = fake::state().gpu;
  const fake::Place place = gpu.memory.for_kernel(address, sizeof(Word));
  Word word = {};
  if (place.memory == nullptr || address % sizeof(Word) != 0) {
    gpu.has_faulted = true;
  } else {
    std::memcpy(&word, place.memory, sizeof(Word));
  }
  return word;
}

template <typename Word>
void fake_store(std::uint64_t address, Word word) {
  fake::Gpu& gpu = fake::state().gpu;
  const fake::Place place = gpu.memory.for_kernel(address, sizeof(Word));
  if (place.memory == nullptr || address % sizeof(Word) != 0) {
    gpu.has_faulted = true;
    return;
  }
  std::memcpy(place.memory, &word, sizeof(Word));
  if (gpu.damages_now) place.memory[0] ^= std::byte{1};
}

}  // namespace

#define ATTNSTORE_FAKE_WORD(Word)                           \
  template <>                                               \
  Word load_word<Word>(std::uint64_t address) {             \
    return fake_load<Word>(address);                        \
  }                                                         \
  template <>                                               \
  void store_word<Word>(std::uint64_t address, Word word) { \
    fake_store<Word>(address, word);                        \
  }

ATTNSTORE_FAKE_WORD(Word16)
ATTNSTORE_FAKE_WORD(Word8)
ATTNSTORE_FAKE_WORD(Word4)
ATTNSTORE_FAKE_WORD(std::uint16_t)
ATTNSTORE_FAKE_WORD(Word1)

}  // namespace attnstore

// ---- the kernels -----------------------------------------------------------------------

// Each thread of the grid has its own numbers.
namespace {

struct Index {
  std::uint32_t x;
};
thread_local Index blockIdx;
thread_local Index threadIdx;
thread_local Index gridDim;

}  // namespace

#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
#include "cuda/kernels.cu"
#undef __grid_constant__
#undef __launch_bounds__
#undef __global__

namespace fake {

namespace {

// The parameters are read at the launch; each thread gets its own.
template <typename... Params>
Function make_function(const char* name, std::uint32_t threads_max, void (*kernel)(Params...)) {
  Function made{name, {sizeof(Params)...}, threads_max, nullptr};
  made.bind = [kernel](Gpu&, void** params) -> Body {
    void** next = params;
    const std::tuple<Params...> read{*static_cast<const Params*>(*next++)...};
    return [kernel, read](Grid grid, std::uint32_t block, std::uint32_t thread) {
      gridDim.x = grid.blocks;
      blockIdx.x = block;
      threadIdx.x = thread;
      std::apply(kernel, read);
    };
  };
  return made;
}

std::map<std::string, Function> make_kernels() {
  std::map<std::string, Function> all;
  const auto add = [&all](const char* name, auto kernel) {
    all.emplace(name, make_function(name, attnstore::kThreadsPerBlock, kernel));
  };
  add("copy_pages_16", attnstore::copy_pages_16);
  add("copy_pages_4", attnstore::copy_pages_4);
  add("copy_pages_1", attnstore::copy_pages_1);
  add("decode_pages_16", attnstore::decode_pages_16);
  add("decode_pages_2", attnstore::decode_pages_2);
  add("encode_pages_16", attnstore::encode_pages_16);
  add("encode_pages_2", attnstore::encode_pages_2);
  add("move_tokens_bf16", attnstore::move_tokens_bf16);
  add("move_tokens_bf16_16", attnstore::move_tokens_bf16_16);
  add("move_tokens_f16", attnstore::move_tokens_f16);
  add("move_tokens_f16_16", attnstore::move_tokens_f16_16);
  add("move_tokens_f32", attnstore::move_tokens_f32);
  add("move_tokens_f32_16", attnstore::move_tokens_f32_16);
  return all;
}

}  // namespace

Function* find_kernel(const std::string& name) {
  static std::map<std::string, Function> kernels = make_kernels();
  const auto found = kernels.find(name);
  return found == kernels.end() ? nullptr : &found->second;
}

bool read_params(const std::string& ptx, const std::string& name, std::vector<std::size_t>* found) {
  const std::size_t begin = ptx.find(".entry " + name + "(");
  if (begin == std::string::npos) return false;
  const std::size_t end = ptx.find(')', begin);
  for (std::size_t at = ptx.find(".param", begin); at < end; at = ptx.find(".param", at + 1)) {
    const std::string one = ptx.substr(at, ptx.find_first_of(",)", at) - at);
    const std::size_t size = one.find('[');
    if (size != std::string::npos) {
      found->push_back(std::stoul(one.substr(size + 1)));
    } else {
      found->push_back(one.find("64") != std::string::npos ? 8 : 4);
    }
  }
  return true;
}

}  // namespace fake
