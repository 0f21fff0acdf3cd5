// SPDX-License-Identifier: Apache-2.0
#include "tests/fake_driver/state.h"

namespace fake {

namespace {

struct Processes {
  std::uint64_t seed = 0;
  std::size_t chosen = 0;
  std::vector<std::unique_ptr<State>> all;
};

Processes& processes() {
  static Processes processes;
  return processes;
}

bool begins_with(const std::string& name, const std::string& beginning) {
  return name.compare(0, beginning.size(), beginning) == 0;
}

void choose(std::size_t index) {
  Processes& known = processes();
  while (known.all.size() <= index) {
    known.all.push_back(std::make_unique<State>(known.seed + known.all.size()));
  }
  known.chosen = index;
}

}  // namespace

State::State(std::uint64_t seed) : gpu(seed) {
  for (int i = 0; i < kDevicesMax; ++i) default_streams[i] = gpu.make_stream(i);
}

State& state() {
  if (processes().all.empty()) choose(0);
  return *processes().all[processes().chosen];
}

Lasting& lasting() {
  static Lasting lasting;
  return lasting;
}

std::recursive_mutex& state_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

std::vector<Context*>& context_stack() {
  static thread_local std::vector<Context*> stack;
  return stack;
}

bool is_damaged(const std::string& name) {
  return !state().damage.empty() && begins_with(name, state().damage);
}

Call::Call(const char* name, Needs needs) : lock_(state_mutex()) {
  State& all = state();
  ++all.counts[name];
  if (needs != kNothing && !lasting().is_initialized) {
    refused = kNotInitialized;
    return;
  }
  for (auto plan = all.plans.begin(); plan != all.plans.end(); ++plan) {
    if (!begins_with(name, plan->first) || plan->second.after-- != 0) continue;
    refused = plan->second.result;
    all.plans.erase(plan);
    return;
  }
  if (needs == kContext && (context_stack().empty() || context_stack().back() == nullptr)) {
    refused = kInvalidContext;
    return;
  }
  if (needs != kContext) return;  // Python may say at any time that an event is nobody's
  all.gpu.let_time_pass();
  if (all.gpu.has_faulted) refused = kIllegalAddress;
}

int current_device() { return context_stack().back()->device; }

Stream* find_stream(Stream* handle) {
  const int device = current_device();
  if (handle == nullptr) return state().default_streams[device];
  if (!state().gpu.has(handle) || handle->device != device) return nullptr;
  return handle;
}

Result after_waiting(bool has_ended) {
  if (state().gpu.has_faulted) return kIllegalAddress;
  return has_ended ? kSuccess : kTimeout;
}

}  // namespace fake

using fake::state;
using Lock = std::lock_guard<std::recursive_mutex>;

void fake_reset(std::uint64_t seed) {
  const Lock lock(fake::state_mutex());
  for (const auto& one : fake::processes().all) {
    for (fake::EventHandle* event : one->events) delete event;
  }
  fake::context_stack().clear();
  fake::processes().all.clear();
  fake::processes().seed = seed;
  fake::choose(0);
}

void fake_use(std::uint64_t process) {
  const Lock lock(fake::state_mutex());
  fake::choose(process);
}

int fake_set(const char* option, std::uint64_t value) {
  const Lock lock(fake::state_mutex());
  fake::State& all = state();
  const std::string name = option;
  if (name == "seed") {
    all.gpu.random.seed(value);
  } else if (name == "busy") {
    all.gpu.busy = static_cast<std::uint32_t>(value);
  } else if (name == "eager") {
    all.gpu.is_eager = value != 0;
  } else if (name == "lenient") {
    all.gpu.memory.is_lenient = value != 0;
  } else if (name == "scattered") {
    all.gpu.memory.is_scattered = value != 0;
  } else if (name == "driver_version") {
    all.version = static_cast<int>(value);
  } else if (name == "devices" && value <= fake::kDevicesMax) {
    all.devices = static_cast<int>(value);
  } else if (name == "register_max") {
    all.register_max = value;
  } else if (name == "batch_max") {
    all.batch_max = value;
  } else if (name == "register_total") {
    all.register_total = value;
  } else {
    return 0;
  }
  return 1;
}

void fake_fail(const char* call, std::uint64_t after, fake::Result result) {
  const Lock lock(fake::state_mutex());
  state().plans[call] = {after, result};
}

void fake_forgive() {
  const Lock lock(fake::state_mutex());
  state().plans.clear();
}

void fake_damage(const char* name) {
  const Lock lock(fake::state_mutex());
  state().damage = name;
}

fake::Result fake_call(const char* call) { return fake::Call(call, fake::Call::kContext).refused; }

static fake::Kind kind_of(int is_hbm) {
  return is_hbm != 0 ? fake::Kind::kHbm : fake::Kind::kShared;
}

void fake_add_memory(std::uint64_t address, std::size_t num_bytes, int is_hbm) {
  const Lock lock(fake::state_mutex());
  state().gpu.memory.add(address, num_bytes, kind_of(is_hbm));
}

void fake_remove_memory(std::uint64_t address, int is_hbm) {
  const Lock lock(fake::state_mutex());
  state().gpu.memory.remove(address, kind_of(is_hbm));
}

int fake_step() {
  const Lock lock(fake::state_mutex());
  return state().gpu.step() ? 1 : 0;
}

std::uint64_t fake_clock() {
  const Lock lock(fake::state_mutex());
  return state().gpu.clock;
}

std::uint64_t fake_count(const char* call) {
  const Lock lock(fake::state_mutex());
  std::uint64_t sum = 0;
  for (const auto& [name, count] : state().counts) {
    if (fake::begins_with(name, call)) sum += count;
  }
  return sum;
}

std::uint64_t fake_pending(const fake::Stream* stream) {
  const Lock lock(fake::state_mutex());
  return stream->work.size();
}

std::uint64_t fake_registered() {
  const Lock lock(fake::state_mutex());
  return state().gpu.memory.count(fake::Kind::kPinned);
}
