// SPDX-License-Identifier: Apache-2.0
#include "io/uring_device.h"

#include <unistd.h>

#include <exception>
#include <future>
#include <system_error>
#include <utility>

#include "io/threads.h"

namespace attnstore {

namespace {

// For the kernel to end what it can end early.
constexpr std::chrono::duration<double> kCancelTime(0.1);

std::shared_ptr<Mailbox> make_mailbox(int fd) {
  try {
    return std::make_shared<Mailbox>();
  } catch (const std::system_error&) {
    ::close(fd);
    throw;
  }
}

}  // namespace

UringDevice::UringDevice(UringOptions options) : mailbox_(make_mailbox(options.fd)) {
  auto started = std::make_shared<std::promise<bool>>();
  std::future<bool> answer = started->get_future();
  thread_ = std::thread([options = std::move(options), box = mailbox_, started]() mutable {
    unbind_this_thread();
    leave_signals_to_others();
    const int fd = options.fd;
    std::unique_ptr<UringLoop> loop;
    try {  // here, since a ring belongs to the thread that makes it
      loop = std::make_unique<UringLoop>(std::move(options), std::move(box));
      started->set_value(loop->has_regions());
    } catch (const std::system_error&) {
      ::close(fd);
      started->set_exception(std::current_exception());
      return;
    }
    loop->run();
  });
  try {
    has_regions_ = answer.get();
  } catch (const std::system_error&) {
    thread_.join();
    throw;
  }
}

UringDevice::~UringDevice() { close(std::chrono::duration<double>(0)); }

bool UringDevice::close(std::chrono::duration<double> timeout) {
  const std::lock_guard lock(closing_);
  if (!thread_.joinable()) {  // closed before; what was left behind may have ended since
    return mailbox_->wait_stopped(timeout) && mailbox_->is_idle();
  }
  mailbox_->close(Mailbox::Closing::kWhenIdle);
  if (!mailbox_->wait_stopped(timeout)) {
    mailbox_->close(Mailbox::Closing::kNow);
    if (!mailbox_->wait_stopped(kCancelTime)) {
      thread_.detach();
      return false;
    }
  }
  thread_.join();
  return mailbox_->is_idle();
}

}  // namespace attnstore
