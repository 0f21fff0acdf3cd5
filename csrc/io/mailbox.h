// SPDX-License-Identifier: Apache-2.0
// What the callers' threads, the hash pool and the ring's thread tell each other.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "io/hash_pool.h"
#include "io/uring_request.h"

namespace attnstore {

// Shared by the device and its ring's thread; the last of the two frees it.
class Mailbox {
 public:
  enum class Closing : std::uint8_t { kNo, kWhenIdle, kNow };

  struct News {
    std::vector<Request> requests;
    std::vector<std::int64_t> cancels;
    std::vector<Job*> hashed;
    Closing closing = Closing::kNo;
  };

  Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  // ---- to the ring's thread, from any thread

  // False if the device is closing: nothing was queued.
  bool submit(std::vector<Request> requests);
  void cancel(const std::vector<std::int64_t>& tags);
  void hashed(Job* job);
  void close(Closing how);
  // Readable when there is news.
  [[nodiscard]] int event_fd() const { return event_fd_; }
  // The news since the last call. Only for the ring's thread.
  News take();

  // ---- from the ring's thread, to any thread

  void ended(std::vector<Ended>* batch);  // leaves it empty
  // The ring's thread ends. `is_idle`: the kernel holds none of its requests. `failure` is empty
  // unless it ends in spite of itself.
  void stopped(bool is_idle, const std::string& failure);

  // What has ended since the last poll; waits up to `timeout` for the first, or for wake().
  std::vector<Ended> poll(std::chrono::duration<double> timeout);
  void wake();
  // Waits for stopped(); false if it was not called before the timeout.
  bool wait_stopped(std::chrono::duration<double> timeout);
  [[nodiscard]] bool is_idle();
  [[nodiscard]] std::string failure();

 private:
  void notify(bool is_first) const;

  const int event_fd_;
  std::mutex in_mutex_;
  News news_;
  bool has_news_ = false;  // since the last take(); the event was written for it

  std::mutex out_mutex_;
  std::condition_variable told_;
  std::vector<Ended> ended_;
  bool woken_ = false;
  bool stopped_ = false;
  bool idle_ = false;
  std::string failure_;
};

}  // namespace attnstore
