// SPDX-License-Identifier: Apache-2.0
#include "copy_queue.h"

#include <stdexcept>
#include <utility>

#include "stream_copy.h"
#include "threads.h"

namespace attnstore {

CopyQueue::CopyQueue(int num_threads) {
  threads_.reserve(static_cast<std::size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

CopyQueue::~CopyQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  for (auto& thread : threads_) thread.join();
}

std::uint64_t CopyQueue::submit(std::vector<Run> runs) {
  auto batch = std::make_shared<Batch>(std::move(runs));
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    ticket = ++last_ticket_;
    open_.emplace(ticket, batch);
    queue_.push_back(std::move(batch));
  }
  queued_.notify_all();
  return ticket;
}

void CopyQueue::wait(std::uint64_t ticket) {
  std::shared_ptr<Batch> batch;
  {
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(ticket);
    if (found == open_.end()) throw std::invalid_argument("this ticket was waited for already");
    batch = std::move(found->second);
    open_.erase(found);
  }
  help(*batch);
  std::unique_lock lock(mutex_);
  copied_.wait(lock, [&] { return batch->left.load(std::memory_order_acquire) == 0; });
}

void CopyQueue::help(Batch& batch) {
  const std::size_t count = batch.runs.size();
  std::size_t done = 0;
  for (std::size_t i = batch.next++; i < count; i = batch.next++) {
    const Run& run = batch.runs[i];
    stream_copy(run.target, run.source, run.num_bytes);
    ++done;
  }
  if (done > 0 && batch.left.fetch_sub(done, std::memory_order_acq_rel) == done) {
    const std::lock_guard lock(mutex_);  // so that a waiter is either before its test or waiting
    copied_.notify_all();
  }
}

void CopyQueue::work() {
  unbind_this_thread();
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;  // stopping, and everything queued was copied
    auto batch = queue_.front();
    if (batch->next.load() >= batch->runs.size()) {
      queue_.pop_front();  // all its runs are taken; the next batch may begin
      continue;
    }
    lock.unlock();
    help(*batch);
    lock.lock();
  }
}

}  // namespace attnstore
