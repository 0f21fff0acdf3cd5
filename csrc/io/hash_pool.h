// SPDX-License-Identifier: Apache-2.0
// Takes the checksums of requests on threads of its own, so that the ring's thread only moves.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/uring_request.h"

namespace attnstore {

// One request on its way through the device. The ring's thread owns it; between HashPool::push()
// and `done` it belongs to the pool, but for `cancelled` and `error`, which the pool never looks
// at.
struct Job {
  explicit Job(Request r);

  Request request;
  std::uint64_t num_bytes = 0;
  std::uint64_t next = 0;        // the first byte that no piece was made for
  std::uint32_t num_flying = 0;  // pieces that the kernel has, or that wait to go again
  bool all_begun = false;        // a piece was made for every byte
  bool cancelled = false;
  int error = 0;  // of the first piece that failed, with its text
  std::string text;
  bool has_checksum = false;
  Checksum checksum{};
};

// Before a write: carries out its seals. After a read: takes the last buffer's checksum.
void hash(Job& job);

// How many bytes hash() would go through.
[[nodiscard]] std::size_t bytes_to_hash(const Job& job);

class HashPool {
 public:
  // `done` is called on the pool's threads.
  HashPool(int num_threads, std::function<void(Job*)> done);
  HashPool(const HashPool&) = delete;
  HashPool& operator=(const HashPool&) = delete;
  ~HashPool();  // every job that was pushed has been done when it returns

  void push(Job* job);

 private:
  void work();

  const std::function<void(Job*)> done_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace attnstore
