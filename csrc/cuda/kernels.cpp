// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "cuda/code_words.h"
#include "cuda/on_device.h"
#include "cuda/rotate_words.h"

namespace attnstore {

namespace {

constexpr std::array<std::uint32_t, 3> kCopyWords = {16, 4, 1};
constexpr std::array<ElementType, 3> kTypes = {ElementType::kBfloat16, ElementType::kFloat16,
                                               ElementType::kFloat32};
constexpr std::array<const char*, 3> kTypeNames = {"bf16", "f16", "f32"};

template <typename Value>
std::size_t place_of(const std::array<Value, 3>& all, Value value) {
  return static_cast<std::size_t>(std::find(all.begin(), all.end(), value) - all.begin());
}

template <typename Job>
void launch(CuFunction function, Job* job, std::uint64_t items, std::uint32_t items_in_flight,
            std::uint32_t thread_blocks, CuStream stream) {
  const std::uint64_t useful = (items - 1) / (kThreadsPerBlock * items_in_flight) + 1;
  const auto blocks = static_cast<std::uint32_t>(
      std::min<std::uint64_t>({thread_blocks, useful, kGridThreadsMax / kThreadsPerBlock}));
  void* params[] = {job};
  check_cuda(driver().launchKernel(function, blocks, 1, 1, kThreadsPerBlock, 1, 1, 0, stream,
                                   params, nullptr),
             "cuLaunchKernel");
}

}  // namespace

CuContext primary_context(int device) {
  static std::mutex mutex;
  static std::map<int, CuContext> contexts;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = contexts.find(device);
  if (found != contexts.end()) return found->second;
  CuDevice handle = 0;
  CuContext context = nullptr;
  check_cuda(driver().deviceGet(&handle, device), "cuDeviceGet");
  check_cuda(driver().devicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  return contexts[device] = context;
}

const Kernels& loaded(const std::shared_ptr<const Kernels>& kernels) {
  if (kernels != nullptr) return *kernels;
  static_cast<void>(driver());
  throw std::runtime_error("no kernels were loaded");
}

Kernels::Kernels(int device, const std::vector<std::string>& images)
    : context_(primary_context(device)) {
  const InContext in_context(context_);
  CuResult result = kCuSuccess;
  for (image_ = 0; image_ < images.size(); ++image_) {
    result = driver().moduleLoadData(&module_, images[image_].c_str());
    if (result == kCuSuccess) break;
  }
  check_cuda(result, "cuModuleLoadData");
  if (images.empty()) throw std::runtime_error("there is no kernel for this device");
  try {
    find_functions();
  } catch (...) {
    static_cast<void>(driver().moduleUnload(module_));
    throw;
  }
}

Kernels::~Kernels() {
  try {
    const InContext in_context(context_);
    static_cast<void>(driver().moduleUnload(module_));
  } catch (const std::runtime_error&) {  // the device or the process ends; so do its modules
  }
}

void Kernels::find_functions() {
  const auto find = [this](const std::string& name, CuFunction* function) {
    const CuResult result = driver().moduleGetFunction(function, module_, name.c_str());
    check_cuda(result, ("cuModuleGetFunction(" + name + ")").c_str());
  };
  for (std::size_t i = 0; i < kCopyWords.size(); ++i) {
    find("copy_pages_" + std::to_string(kCopyWords[i]), &copies_[i]);
  }
  for (const bool is_decoding : {false, true}) {
    const std::string name = is_decoding ? "decode_pages_" : "encode_pages_";
    find(name + "2", codes_[is_decoding ? 1 : 0].data());
    find(name + "16", &codes_[is_decoding ? 1 : 0][1]);
  }
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    find(std::string("move_tokens_") + kTypeNames[i], rotations_[i].data());
    find(std::string("move_tokens_") + kTypeNames[i] + "_16", &rotations_[i][1]);
  }
}

void Kernels::copy(CopyJob job, std::uint32_t word_bytes, std::uint32_t thread_blocks,
                   CuStream stream) const {
  const std::uint64_t lanes = word_bytes == sizeof(Word16) ? kLanes<Word16> : kLanesMax;
  launch(copies_[place_of(kCopyWords, word_bytes)], &job, job.num_pieces * lanes, 1, thread_blocks,
         stream);
}

void Kernels::code(CodeJob job, bool is_decoding, std::uint32_t word_bytes,
                   std::uint32_t thread_blocks, CuStream stream) const {
  const bool is_wide = word_bytes == sizeof(Word16);
  launch(codes_[is_decoding ? 1 : 0][is_wide ? 1 : 0], &job,
         std::uint64_t{job.num_parts} * kWarpLanes, 1, thread_blocks, stream);
}

void Kernels::rotate(RotateJob job, ElementType type, bool is_wide, std::uint32_t thread_blocks,
                     CuStream stream) const {
  launch(rotations_[place_of(kTypes, type)][is_wide ? 1 : 0], &job, job.num_items, kItemsInFlight,
         thread_blocks, stream);
}

}  // namespace attnstore
