// SPDX-License-Identifier: Apache-2.0
// A file as a device, through io_uring. All methods may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/mailbox.h"
#include "io/uring_loop.h"

namespace attnstore {

class UringDevice {
 public:
  // Takes over options.fd, also if it throws: std::system_error if the kernel gives no io_uring.
  explicit UringDevice(UringOptions options);
  UringDevice(const UringDevice&) = delete;
  UringDevice& operator=(const UringDevice&) = delete;
  ~UringDevice();  // close(0)

  // Whether the regions are pinned once, rather than for each transfer.
  [[nodiscard]] bool has_regions() const { return has_regions_; }

  // False if the device is closed: nothing was queued. Otherwise each request ends exactly once.
  bool submit(std::vector<Request> requests) { return mailbox_->submit(std::move(requests)); }
  void cancel(const std::vector<std::int64_t>& tags) { mailbox_->cancel(tags); }
  std::vector<Ended> poll(std::chrono::duration<double> timeout) { return mailbox_->poll(timeout); }
  void wake() { mailbox_->wake(); }
  // Why nothing is served any more; empty while the device is well or was closed.
  [[nodiscard]] std::string failure() { return mailbox_->failure(); }

  // Waits for what is in flight, then cancels what is left. False if the kernel still holds
  // requests: then the ring and its thread are left to themselves, and the requests' buffers must
  // stay as long as the process.
  bool close(std::chrono::duration<double> timeout);

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  bool has_regions_ = false;
  std::mutex closing_;  // one closes at a time
  std::thread thread_;  // joined, or detached, by the first close()
};

}  // namespace attnstore
