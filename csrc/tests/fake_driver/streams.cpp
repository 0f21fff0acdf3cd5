// SPDX-License-Identifier: Apache-2.0
#include "tests/fake_driver/streams.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace fake {

namespace {

constexpr std::uint32_t kWarp = 32;
// A stream is this much slower than others for a while.
constexpr std::uint32_t kWeights[] = {1, 1, 8, 64};
constexpr std::uint64_t kStepsOfWeights = 48;

struct Copies {
  std::vector<Run> left;
  std::vector<std::vector<std::byte>> early;  // what was read before its time, as `left` is
  bool is_wrong;
};

struct Threads {
  Grid grid;
  Body body;
  std::vector<std::uint32_t> warps;  // that are left, over all blocks
};

}  // namespace

Stream* Gpu::make_stream(int device) {
  streams_.push_back(std::make_unique<Stream>());
  streams_.back()->device = device;
  return streams_.back().get();
}

bool Gpu::has(const Stream* stream) const {
  return std::any_of(streams_.begin(), streams_.end(),
                     [&](const auto& one) { return one.get() == stream && one->is_live; });
}

// What it was given is carried out nevertheless, as the real driver does.
void Gpu::remove(Stream* stream) { stream->is_live = false; }

bool Gpu::is_idle(int device) const {
  return std::all_of(streams_.begin(), streams_.end(), [&](const auto& one) {
    return one->work.empty() || (device >= 0 && one->device != device);
  });
}

void Gpu::give(Stream& stream, Work work) {
  stream.work.push_back(std::move(work));
  if (is_eager) run_until([&] { return stream.work.empty(); });
}

void Gpu::record(Stream& stream, std::shared_ptr<Event> event) {
  const std::uint64_t number = ++event->recorded;
  give(stream, {[event = std::move(event), number](Gpu& gpu) {
                  event->reached = number;
                  event->at = gpu.clock;
                  return true;
                },
                nullptr});
}

void Gpu::wait(Stream& stream, const std::shared_ptr<Event>& event) {
  const std::uint64_t number = event->recorded;
  give(stream, {[](Gpu&) { return true; }, [event, number] { return event->reached >= number; }});
}

void Gpu::copy(Stream& stream, std::vector<Run> runs, bool reads_early, bool is_wrong) {
  auto copies = std::make_shared<Copies>();
  std::shuffle(runs.begin(), runs.end(), random);
  copies->left = std::move(runs);
  copies->early.resize(copies->left.size());
  copies->is_wrong = is_wrong;
  for (std::size_t i = 0; reads_early && i < copies->left.size(); ++i) {
    const Run& run = copies->left[i];
    const Place source = memory.for_copy(run.source, run.num_bytes);
    if (random() % 2 != 0 && source.memory != nullptr) {
      copies->early[i].assign(source.memory, source.memory + run.num_bytes);
    }
  }
  give(stream, {[copies](Gpu& gpu) {
                  if (copies->left.empty()) return true;
                  Run& run = copies->left.back();
                  std::vector<std::byte>& early = copies->early.back();
                  const std::size_t whole = run.num_bytes;
                  const std::size_t part =
                      early.empty() && whole > 1 && gpu.random() % 4 == 0 ? whole / 2 : whole;
                  Place source = gpu.memory.for_copy(run.source, part);
                  if (!early.empty()) source = {early.data(), Kind::kShared};
                  gpu.damages_now = copies->is_wrong;
                  gpu.move(gpu.memory.for_copy(run.target, part), source, part);
                  gpu.damages_now = false;
                  run = {run.target + part, run.source + part, whole - part};
                  if (run.num_bytes == 0) {
                    copies->left.pop_back();
                    copies->early.pop_back();
                  }
                  return copies->left.empty();
                },
                nullptr});
}

void Gpu::launch(Stream& stream, Grid grid, Body body) {
  auto threads = std::make_shared<Threads>();
  threads->grid = grid;
  threads->body = std::move(body);
  threads->warps.resize(static_cast<std::size_t>(grid.blocks) * ((grid.threads - 1) / kWarp + 1));
  std::iota(threads->warps.begin(), threads->warps.end(), 0U);
  std::shuffle(threads->warps.begin(), threads->warps.end(), random);
  give(stream, {[threads](Gpu& gpu) {
                  const std::uint32_t per_block = (threads->grid.threads - 1) / kWarp + 1;
                  std::size_t count = 1 + gpu.random() % threads->warps.size();
                  for (; count > 0; --count) {
                    const std::uint32_t warp = threads->warps.back();
                    threads->warps.pop_back();
                    const std::uint32_t first = warp % per_block * kWarp;
                    const std::uint32_t stop = std::min(first + kWarp, threads->grid.threads);
                    for (std::uint32_t thread = first; thread < stop; ++thread) {
                      threads->body(threads->grid, warp / per_block, thread);
                    }
                  }
                  return threads->warps.empty();
                },
                nullptr});
}

void Gpu::move(const Place& target, const Place& source, std::size_t num_bytes) {
  if (target.memory == nullptr || source.memory == nullptr) {
    has_faulted = true;
    return;
  }
  std::memmove(target.memory, source.memory, num_bytes);
  if (damages_now) target.memory[0] ^= std::byte{1};
}

void Gpu::draw_weights() {
  for (const auto& stream : streams_) stream->weight = kWeights[random() % std::size(kWeights)];
}

bool Gpu::step() {
  if (is_running_) return false;
  if (clock % kStepsOfWeights == 0) draw_weights();
  ready_.clear();
  std::uint64_t sum = 0;
  for (const auto& stream : streams_) {
    if (stream->work.empty()) continue;
    const Work& next = stream->work.front();
    if (next.is_ready && !next.is_ready()) continue;
    ready_.push_back(stream.get());
    sum += stream->weight;
  }
  if (ready_.empty()) return false;
  std::uint64_t drawn = random() % sum;
  std::size_t chosen = 0;
  while (drawn >= ready_[chosen]->weight) drawn -= ready_[chosen++]->weight;
  Stream* const stream = ready_[chosen];
  ++clock;
  is_running_ = true;
  const bool is_over = stream->work.front().run(*this);
  is_running_ = false;
  if (is_over) stream->work.pop_front();
  return true;
}

bool Gpu::run_until(const std::function<bool()>& is_so) {
  while (!is_so()) {
    if (!step()) return false;
  }
  return true;
}

void Gpu::let_time_pass() {
  if (busy == 0 || random() % 100 >= busy) return;
  for (std::uint64_t i = random() % 8; i > 0 && step(); --i) {
  }
}

}  // namespace fake
