// SPDX-License-Identifier: Apache-2.0
// Copies between pageable memory, in order, beside the caller: a stream for the CPU.
//
// A batch is a set of runs (source, target, bytes) that do not overlap. Batches are begun in the
// order of submission. wait() returns when all runs of a batch have been copied; the caller
// copies too while it waits, so that a queue without a free processor is never slower than a
// plain loop over memcpy.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace attnstore {

struct Run {
  const std::byte* source;
  std::byte* target;
  std::size_t num_bytes;
};

class CopyQueue {
 public:
  // Starts `num_threads` threads; they live as long as the queue.
  explicit CopyQueue(int num_threads);
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;
  ~CopyQueue();

  // Queues the runs and returns their ticket at once. Sources and targets stay valid until
  // wait() has returned for the ticket.
  std::uint64_t submit(std::vector<Run> runs);

  // Returns when the batch is copied. A ticket is waited for once.
  void wait(std::uint64_t ticket);

 private:
  struct Batch {
    explicit Batch(std::vector<Run> r) : runs(std::move(r)), left(runs.size()) {}
    std::vector<Run> runs;
    std::atomic<std::size_t> next{0};  // the first run that nobody has taken
    std::atomic<std::size_t> left;     // runs that are not copied yet
  };

  void work();
  // Takes runs of the batch until none is left to take.
  void help(Batch& batch);

  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable copied_;
  std::deque<std::shared_ptr<Batch>> queue_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Batch>> open_;
  std::uint64_t last_ticket_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace attnstore
