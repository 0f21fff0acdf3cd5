// SPDX-License-Identifier: Apache-2.0
// Streams that are carried out late, and in any interleaving that their events allow: nothing runs
// before somebody waits or step() is called; then a die says which stream goes on, and with which
// piece of its work. One thread at a time uses this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "tests/fake_driver/memory.h"

namespace fake {

struct Event {
  bool has_timing = true;
  std::uint64_t recorded = 0;  // how often
  std::uint64_t reached = 0;   // the latest that a stream has come past
  std::uint64_t at = 0;        // the clock then
};

class Gpu;

// A part of what a stream does. run() carries out one piece of it, and says whether it was the
// last; is_ready() says whether a piece could be carried out now.
struct Work {
  std::function<bool(Gpu&)> run;
  std::function<bool()> is_ready;  // empty: always
};

struct Stream {
  int device = 0;
  bool is_live = true;
  std::uint32_t weight = 1;
  std::deque<Work> work;
};

struct Run {
  std::uint64_t target;
  std::uint64_t source;
  std::size_t num_bytes;
};

// The threads of a grid, as the kernel's body is compiled for the host.
struct Grid {
  std::uint32_t blocks;
  std::uint32_t threads;
};
using Body = std::function<void(Grid grid, std::uint32_t block, std::uint32_t thread)>;

class Gpu {
 public:
  explicit Gpu(std::uint64_t seed) : random(seed) {}

  Stream* make_stream(int device);
  void remove(Stream* stream);
  [[nodiscard]] bool has(const Stream* stream) const;
  // Work that was given to all streams of a device, or to all streams (-1), and is not over.
  [[nodiscard]] bool is_idle(int device) const;

  void give(Stream& stream, Work work);
  void record(Stream& stream, std::shared_ptr<Event> event);
  void wait(Stream& stream, const std::shared_ptr<Event>& event);
  // Runs in any order, each in one or two pieces. `reads_early`: sources may be read before the
  // stream comes to them. `is_wrong`: so is what is written.
  void copy(Stream& stream, std::vector<Run> runs, bool reads_early, bool is_wrong);
  void launch(Stream& stream, Grid grid, Body body);

  // Carries out one piece; false if no stream can go on, or a function of the host is running: it
  // may end events, as Python does with what nobody has any more.
  bool step();
  // False if the streams wait for each other.
  bool run_until(const std::function<bool()>& is_so);
  // A few pieces, or none: the device does not wait until somebody looks.
  void let_time_pass();

  Memory memory;
  std::mt19937_64 random;
  std::uint64_t clock = 0;   // pieces that were carried out
  std::uint32_t busy = 0;    // of 100 calls, how many find that time has passed
  bool is_eager = false;     // all is carried out when it is given to a stream
  bool has_faulted = false;  // a kernel or a copy has accessed what it may not
  bool damages_now = false;  // what the piece writes that is being carried out is wrong

  // One word or run from here to there; sets has_faulted.
  void move(const Place& target, const Place& source, std::size_t num_bytes);

 private:
  void draw_weights();

  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> ready_;
  bool is_running_ = false;
};

}  // namespace fake
