// SPDX-License-Identifier: Apache-2.0
#include "io/hash_pool.h"

#include <cstring>
#include <utility>

#include "io/threads.h"

namespace attnstore {

Job::Job(Request r) : request(std::move(r)) {
  for (const Span& span : request.buffers) num_bytes += span.num_bytes;
}

void hash(Job& job) {
  const Request& request = job.request;
  if (request.op == Op::kWrite) {
    for (const Seal& seal : request.seals) {
      const Span& of = request.buffers[seal.of];
      const Checksum sum = checksum(of.data, of.num_bytes);
      std::memcpy(request.buffers[0].data + seal.at, sum.data(), kChecksumBytes);
      if (!job.has_checksum) job.checksum = sum;
      job.has_checksum = true;
    }
  } else {
    const Span& last = request.buffers.back();
    job.checksum = checksum(last.data, last.num_bytes);
    job.has_checksum = true;
  }
}

std::size_t bytes_to_hash(const Job& job) {
  const Request& request = job.request;
  if (request.op == Op::kRead) return request.checksum ? request.buffers.back().num_bytes : 0;
  std::size_t total = 0;
  for (const Seal& seal : request.seals) total += request.buffers[seal.of].num_bytes;
  return total;
}

HashPool::HashPool(int num_threads, std::function<void(Job*)> done) : done_(std::move(done)) {
  threads_.reserve(static_cast<std::size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

HashPool::~HashPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void HashPool::push(Job* job) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(job);
  }
  queued_.notify_one();
}

void HashPool::work() {
  unbind_this_thread();
  leave_signals_to_others();
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job* const job = queue_.front();
    queue_.pop_front();
    lock.unlock();
    hash(*job);
    done_(job);
    lock.lock();
  }
}

}  // namespace attnstore
