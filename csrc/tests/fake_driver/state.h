// SPDX-License-Identifier: Apache-2.0
// All that the fake driver knows, and what each of its calls does first.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/fake_driver/driver_api.h"
#include "tests/fake_driver/host_kernels.h"
#include "tests/fake_driver/streams.h"

namespace fake {

struct EventHandle {
  std::shared_ptr<Event> event = std::make_shared<Event>();
};

struct Module {
  std::string ptx;  // empty: the image is another kind of code
};

struct Plan {
  std::uint64_t after;
  Result result;
};

constexpr int kDevicesMax = 8;
constexpr int kNewest = 13000;

// Of one process and its GPU.
struct State {
  explicit State(std::uint64_t seed);

  Gpu gpu;
  Stream* default_streams[kDevicesMax] = {};
  int devices = 1;
  int version = kNewest;
  std::uint64_t register_max = UINT64_MAX;
  std::uint64_t batch_max = UINT64_MAX;
  std::uint64_t register_total = UINT64_MAX;
  std::string damage;
  std::map<std::string, std::uint64_t> counts;
  std::map<std::string, Plan> plans;
  std::set<EventHandle*> events;
  std::map<std::uint64_t, std::unique_ptr<std::byte[]>> allocations;
};

// What the host code may keep for as long as the process lives: no reset forgets it.
struct Lasting {
  bool is_initialized = false;
  Context contexts[kDevicesMax] = {};
  std::set<Module*> modules;
};

State& state();  // of the process that is chosen
Lasting& lasting();
std::recursive_mutex& state_mutex();
// Of this thread; the last is the current one.
std::vector<Context*>& context_stack();

// One call of the driver: alone, counted, and refused where a test or an earlier fault says so.
class Call {
 public:
  enum Needs : std::uint8_t { kNothing, kDriver, kContext };

  Call(const char* name, Needs needs);
  Result refused = kSuccess;

 private:
  std::lock_guard<std::recursive_mutex> lock_;
};

// Null handles are the device's default stream. Null: there is no such stream of this context.
Stream* find_stream(Stream* handle);
int current_device();
// Whether what this call or kernel writes is to be wrong.
bool is_damaged(const std::string& name);
// kSuccess, or what the copies and kernels before it have come to.
Result after_waiting(bool has_ended);

}  // namespace fake

// The beginning of each call.
#define FAKE_CALL(name, needs)                     \
  const fake::Call call(#name, fake::Call::needs); \
  if (call.refused != fake::kSuccess) return call.refused
