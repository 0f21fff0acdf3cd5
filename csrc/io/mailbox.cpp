// SPDX-License-Identifier: Apache-2.0
#include "io/mailbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

namespace attnstore {

namespace {

// A clock's arithmetic overflows long before a double does.
std::chrono::nanoseconds bounded(std::chrono::duration<double> timeout) {
  const double day_s = 86400;
  const std::chrono::duration<double> clamped(std::clamp(timeout.count(), 0.0, day_s));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(clamped);
}

}  // namespace

Mailbox::Mailbox() : event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Mailbox::~Mailbox() { ::close(event_fd_); }

void Mailbox::notify(bool is_first) const {
  if (!is_first) return;  // the ring's thread has not seen the last event yet
  const std::uint64_t one = 1;
  // It cannot be full: it is written once for each time that it is taken.
  while (write(event_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

bool Mailbox::submit(std::vector<Request> requests) {
  bool is_first = false;
  {
    const std::lock_guard lock(in_mutex_);
    if (news_.closing != Closing::kNo) return false;
    std::move(requests.begin(), requests.end(), std::back_inserter(news_.requests));
    is_first = !std::exchange(has_news_, true);
  }
  notify(is_first);
  return true;
}

void Mailbox::cancel(const std::vector<std::int64_t>& tags) {
  bool is_first = false;
  {
    const std::lock_guard lock(in_mutex_);
    news_.cancels.insert(news_.cancels.end(), tags.begin(), tags.end());
    is_first = !std::exchange(has_news_, true);
  }
  notify(is_first);
}

void Mailbox::hashed(Job* job) {
  bool is_first = false;
  {
    const std::lock_guard lock(in_mutex_);
    news_.hashed.push_back(job);
    is_first = !std::exchange(has_news_, true);
  }
  notify(is_first);
}

void Mailbox::close(Closing how) {
  bool is_first = false;
  {
    const std::lock_guard lock(in_mutex_);
    news_.closing = std::max(news_.closing, how);
    is_first = !std::exchange(has_news_, true);
  }
  notify(is_first);
}

Mailbox::News Mailbox::take() {
  // First the event and then the news: what comes between is taken now and wakes once in vain.
  std::uint64_t count = 0;
  while (read(event_fd_, &count, sizeof(count)) < 0 && errno == EINTR) {
  }
  const std::lock_guard lock(in_mutex_);
  News taken = std::exchange(news_, News{});
  news_.closing = taken.closing;
  has_news_ = false;
  return taken;
}

void Mailbox::ended(std::vector<Ended>* batch) {
  if (batch->empty()) return;
  {
    const std::lock_guard lock(out_mutex_);
    std::move(batch->begin(), batch->end(), std::back_inserter(ended_));
  }
  batch->clear();
  told_.notify_all();
}

void Mailbox::stopped(bool is_idle, const std::string& failure) {
  {
    const std::lock_guard lock(out_mutex_);
    stopped_ = true;
    idle_ = is_idle;
    failure_ = failure;
  }
  told_.notify_all();
}

std::vector<Ended> Mailbox::poll(std::chrono::duration<double> timeout) {
  std::unique_lock lock(out_mutex_);
  const auto has_news = [&] { return woken_ || !ended_.empty() || !failure_.empty(); };
  if (timeout.count() > 0) told_.wait_for(lock, bounded(timeout), has_news);
  woken_ = false;
  return std::exchange(ended_, {});
}

void Mailbox::wake() {
  {
    const std::lock_guard lock(out_mutex_);
    woken_ = true;
  }
  told_.notify_all();
}

bool Mailbox::wait_stopped(std::chrono::duration<double> timeout) {
  std::unique_lock lock(out_mutex_);
  return told_.wait_for(lock, bounded(timeout), [&] { return stopped_; });
}

bool Mailbox::is_idle() {
  const std::lock_guard lock(out_mutex_);
  return idle_;
}

std::string Mailbox::failure() {
  const std::lock_guard lock(out_mutex_);
  return failure_;
}

}  // namespace attnstore
