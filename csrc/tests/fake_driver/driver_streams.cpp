// SPDX-License-Identifier: Apache-2.0
// The driver's calls about streams, events, copies and kernels.
#include <cstring>

#include "tests/fake_driver/state.h"

using fake::Address;
using fake::Result;
using fake::state;

namespace {

constexpr unsigned int kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kDuringCall = 2;              // CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
constexpr int kAnyOrder = 3;                // CU_MEMCPY_SRC_ACCESS_ORDER_ANY
constexpr unsigned int kThreadsMax = 1024;

bool is_event(fake::EventHandle* event) { return state().events.count(event) != 0; }

bool has_ended(const fake::EventHandle* event) {
  return event->event->reached >= event->event->recorded;
}

// Refused here and not later, as by the real driver, where nothing is page-locked.
bool may_copy(const fake::Run& run) {
  const fake::Memory& memory = state().gpu.memory;
  return memory.for_copy(run.target, run.num_bytes).memory != nullptr &&
         memory.for_copy(run.source, run.num_bytes).memory != nullptr;
}

Result copy(Address target, Address source, std::size_t num_bytes, fake::Stream* handle) {
  fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr) return fake::kInvalidHandle;
  const fake::Run run{target, source, num_bytes};
  if (num_bytes == 0) return fake::kSuccess;
  if (!may_copy(run)) return fake::kInvalidValue;
  state().gpu.copy(*stream, {run}, false, fake::is_damaged("cuMemcpyAsync"));
  return fake::kSuccess;
}

Result copy_batch(const Address* targets, const Address* sources, const std::size_t* sizes,
                  std::size_t count, const fake::CopyAttributes* attributes,
                  const std::size_t* attributes_from, std::size_t num_attributes,
                  fake::Stream* handle) {
  fake::Stream* const stream = fake::find_stream(handle);
  // The real one refuses the default stream.
  if (handle == nullptr || stream == nullptr) return fake::kInvalidHandle;
  if (count == 0 || num_attributes != 1 || attributes_from[0] != 0) return fake::kInvalidValue;
  if (count > state().batch_max) return fake::kInvalidValue;
  const int order = attributes->source_order;
  if (order < 1 || order > kAnyOrder || order == kDuringCall) return fake::kInvalidValue;
  std::vector<fake::Run> runs;
  for (std::size_t i = 0; i < count; ++i) {
    runs.push_back({targets[i], sources[i], sizes[i]});
    if (sizes[i] == 0 || !may_copy(runs.back())) return fake::kInvalidValue;
  }
  state().gpu.copy(*stream, std::move(runs), order == kAnyOrder,
                   fake::is_damaged("cuMemcpyBatchAsync"));
  return fake::kSuccess;
}

}  // namespace

// ---- streams and events ----------------------------------------------------------------

Result cuStreamCreateWithPriority(fake::Stream** stream, unsigned int /*flags*/, int /*priority*/) {
  FAKE_CALL(cuStreamCreateWithPriority, kContext);
  *stream = state().gpu.make_stream(fake::current_device());
  return fake::kSuccess;
}

Result cuStreamCreate(fake::Stream** stream, unsigned int flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

Result cuStreamDestroy_v2(fake::Stream* stream) {
  FAKE_CALL(cuStreamDestroy_v2, kContext);
  if (stream == nullptr || fake::find_stream(stream) == nullptr) return fake::kInvalidHandle;
  state().gpu.remove(stream);
  return fake::kSuccess;
}

Result cuStreamQuery(fake::Stream* handle) {
  FAKE_CALL(cuStreamQuery, kContext);
  const fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr) return fake::kInvalidHandle;
  return stream->work.empty() ? fake::kSuccess : fake::kNotReady;
}

Result cuStreamSynchronize(fake::Stream* handle) {
  FAKE_CALL(cuStreamSynchronize, kContext);
  const fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr) return fake::kInvalidHandle;
  return fake::after_waiting(state().gpu.run_until([&] { return stream->work.empty(); }));
}

Result cuStreamWaitEvent(fake::Stream* handle, fake::EventHandle* event, unsigned int /*flags*/) {
  FAKE_CALL(cuStreamWaitEvent, kContext);
  fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr || !is_event(event)) return fake::kInvalidHandle;
  state().gpu.wait(*stream, event->event);
  return fake::kSuccess;
}

Result cuEventCreate(fake::EventHandle** event, unsigned int flags) {
  FAKE_CALL(cuEventCreate, kContext);
  *event = new fake::EventHandle;
  (*event)->event->has_timing = (flags & kDisableTiming) == 0;
  state().events.insert(*event);
  return fake::kSuccess;
}

Result cuEventDestroy_v2(fake::EventHandle* event) {
  FAKE_CALL(cuEventDestroy_v2, kDriver);
  if (state().events.erase(event) == 0) return fake::kInvalidHandle;
  delete event;
  return fake::kSuccess;
}

Result cuEventRecord(fake::EventHandle* event, fake::Stream* handle) {
  FAKE_CALL(cuEventRecord, kContext);
  fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr || !is_event(event)) return fake::kInvalidHandle;
  state().gpu.record(*stream, event->event);
  return fake::kSuccess;
}

Result cuEventQuery(fake::EventHandle* event) {
  FAKE_CALL(cuEventQuery, kContext);
  if (!is_event(event)) return fake::kInvalidHandle;
  return has_ended(event) ? fake::kSuccess : fake::kNotReady;
}

Result cuEventSynchronize(fake::EventHandle* event) {
  FAKE_CALL(cuEventSynchronize, kContext);
  if (!is_event(event)) return fake::kInvalidHandle;
  return fake::after_waiting(state().gpu.run_until([&] { return has_ended(event); }));
}

// A piece of work counts as a millisecond.
Result cuEventElapsedTime(float* ms, fake::EventHandle* start, fake::EventHandle* end) {
  FAKE_CALL(cuEventElapsedTime, kContext);
  if (!is_event(start) || !is_event(end)) return fake::kInvalidHandle;
  const fake::Event& from = *start->event;
  const fake::Event& to = *end->event;
  if (!from.has_timing || !to.has_timing || from.recorded == 0 || to.recorded == 0) {
    return fake::kInvalidHandle;
  }
  if (!has_ended(start) || !has_ended(end)) return fake::kNotReady;
  *ms = static_cast<float>(to.at) - static_cast<float>(from.at);
  return fake::kSuccess;
}

Result cuEventElapsedTime_v2(float* ms, fake::EventHandle* start, fake::EventHandle* end) {
  return cuEventElapsedTime(ms, start, end);
}

// ---- copies ----------------------------------------------------------------------------

Result cuMemcpyAsync(Address target, Address source, std::size_t num_bytes, fake::Stream* stream) {
  FAKE_CALL(cuMemcpyAsync, kContext);
  return copy(target, source, num_bytes, stream);
}

Result cuMemcpyHtoDAsync_v2(Address target, const void* source, std::size_t num_bytes,
                            fake::Stream* stream) {
  FAKE_CALL(cuMemcpyHtoDAsync_v2, kContext);
  return copy(target, reinterpret_cast<Address>(source), num_bytes, stream);
}

Result cuMemcpyDtoHAsync_v2(void* target, Address source, std::size_t num_bytes,
                            fake::Stream* stream) {
  FAKE_CALL(cuMemcpyDtoHAsync_v2, kContext);
  return copy(reinterpret_cast<Address>(target), source, num_bytes, stream);
}

Result cuMemcpyBatchAsync(Address* targets, Address* sources, std::size_t* sizes, std::size_t count,
                          fake::CopyAttributes* attributes, std::size_t* attributes_from,
                          std::size_t num_attributes, std::size_t* failed, fake::Stream* stream) {
  FAKE_CALL(cuMemcpyBatchAsync, kContext);
  if (state().version < 12080) return fake::kNotSupported;
  if (failed == nullptr) return fake::kInvalidValue;
  return copy_batch(targets, sources, sizes, count, attributes, attributes_from, num_attributes,
                    stream);
}

Result cuMemcpyBatchAsync_v2(Address* targets, Address* sources, std::size_t* sizes,
                             std::size_t count, fake::CopyAttributes* attributes,
                             std::size_t* attributes_from, std::size_t num_attributes,
                             fake::Stream* stream) {
  FAKE_CALL(cuMemcpyBatchAsync_v2, kContext);
  return copy_batch(targets, sources, sizes, count, attributes, attributes_from, num_attributes,
                    stream);
}

// ---- kernels ---------------------------------------------------------------------------

Result cuModuleLoadData(fake::Module** module, const void* image) {
  FAKE_CALL(cuModuleLoadData, kContext);
  const auto* const text = static_cast<const char*>(image);
  if (text == nullptr || text[0] == '\0') return fake::kInvalidImage;
  const bool is_binary = std::memcmp(text,
                                     "\x7f"
                                     "ELF",
                                     4) == 0 ||
                         std::memcmp(text, "\x50\xed\x55\xba", 4) == 0;
  if (!is_binary && std::strstr(text, ".version") == nullptr) return fake::kInvalidImage;
  *module = new fake::Module{is_binary ? "" : text};
  fake::lasting().modules.insert(*module);
  return fake::kSuccess;
}

Result cuModuleLoadDataEx(fake::Module** module, const void* image, unsigned int /*num_options*/,
                          int* /*options*/, void** /*values*/) {
  return cuModuleLoadData(module, image);
}

Result cuModuleUnload(fake::Module* module) {
  FAKE_CALL(cuModuleUnload, kDriver);
  if (fake::lasting().modules.erase(module) == 0) return fake::kInvalidHandle;
  delete module;
  return fake::kSuccess;
}

// Where the image is PTX, its kernel has the parameters that the host's has.
Result cuModuleGetFunction(fake::Function** function, fake::Module* module, const char* name) {
  FAKE_CALL(cuModuleGetFunction, kContext);
  if (fake::lasting().modules.count(module) == 0) return fake::kInvalidHandle;
  *function = fake::find_kernel(name);
  if (*function == nullptr) return fake::kNotFound;
  std::vector<std::size_t> declared;
  if (!module->ptx.empty() &&
      (!fake::read_params(module->ptx, name, &declared) || declared != (*function)->param_bytes)) {
    return fake::kNotFound;
  }
  return fake::kSuccess;
}

Result cuLaunchKernel(fake::Function* function, unsigned int grid_x, unsigned int grid_y,
                      unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                      unsigned int block_z, unsigned int shared_bytes, fake::Stream* handle,
                      void** params, void** extra) {
  FAKE_CALL(cuLaunchKernel, kContext);
  fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr || function == nullptr) return fake::kInvalidHandle;
  const bool is_flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
  if (!is_flat || grid_x == 0 || block_x == 0 || block_x > kThreadsMax || shared_bytes != 0 ||
      params == nullptr || extra != nullptr || block_x > function->threads_max) {
    return fake::kInvalidValue;
  }
  const fake::Call of_kernel(function->name.c_str(), fake::Call::kContext);
  if (of_kernel.refused != fake::kSuccess) return of_kernel.refused;
  fake::Gpu& gpu = state().gpu;
  const bool is_wrong = fake::is_damaged(function->name);
  fake::Body body = function->bind(gpu, params);
  gpu.launch(*stream, {grid_x, block_x},
             [&gpu, is_wrong, body = std::move(body)](fake::Grid grid, std::uint32_t block,
                                                      std::uint32_t thread) {
               gpu.damages_now = is_wrong;
               body(grid, block, thread);
               gpu.damages_now = false;
             });
  return fake::kSuccess;
}

Result cuLaunchHostFunc(fake::Stream* handle, void (*function)(void*), void* data) {
  FAKE_CALL(cuLaunchHostFunc, kContext);
  fake::Stream* const stream = fake::find_stream(handle);
  if (stream == nullptr || function == nullptr) return fake::kInvalidHandle;
  state().gpu.give(*stream, {[function, data](fake::Gpu&) {
                               function(data);
                               return true;
                             },
                             nullptr});
  return fake::kSuccess;
}
