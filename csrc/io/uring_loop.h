// SPDX-License-Identifier: Apache-2.0
// The thread that owns the ring: requests become pieces, pieces become submissions.
//
//   request  ->  [seals]  ->  ready  ->  pieces in flight  ->  [checksum]  ->  ended
//
// Everything here but the mailbox belongs to this one thread. A piece is at most `piece_bytes` of
// a request, so that one large request keeps the disk as busy as many small ones.
#pragma once

#include <liburing.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/hash_pool.h"
#include "io/mailbox.h"

namespace attnstore {

struct UringOptions {
  int fd = -1;                // the loop takes it over
  std::uint32_t depth = 0;    // pieces in flight
  std::vector<Span> regions;  // where most buffers lie: pinned once, if the limits allow it
  std::size_t piece_bytes = 0;
  int num_hash_threads = 0;  // with none, the ring's thread takes the checksums
};

class UringLoop {
 public:
  // To be made on the thread that calls run(). Throws std::system_error if there is no io_uring.
  UringLoop(UringOptions options, std::shared_ptr<Mailbox> mailbox);
  UringLoop(const UringLoop&) = delete;
  UringLoop& operator=(const UringLoop&) = delete;
  ~UringLoop();

  // Serves the mailbox until it is closed and nothing is left to do.
  void run();
  [[nodiscard]] bool has_regions() const { return has_regions_; }

 private:
  static constexpr std::size_t kNoRegion = ~std::size_t{0};

  struct Piece {
    Job* job = nullptr;
    std::uint32_t generation = 0;  // tells this use of the place from the one before
    std::uint64_t at = 0;          // the first byte of the request that has not been moved
    std::uint64_t end = 0;
    int num_retries = 0;
    std::vector<iovec> spans;  // the kernel may read it until the piece ends
  };

  void set_up_ring();
  void register_regions();

  void take_news();
  void begin(Request request);
  void make_ready(Job* job);
  void cancel(Job* job);
  void cancel_all();
  void hashed(Job* job);
  void finish(Job* job);
  void finish_if_done(Job* job);

  void dispatch();
  bool send(std::uint32_t place);  // false if there is no room for it now
  static void set_spans(Piece* piece);
  [[nodiscard]] std::uint64_t piece_bytes(const Job& job) const;
  [[nodiscard]] static std::uint64_t file_offset(const Piece& piece);
  [[nodiscard]] std::size_t region_of(const iovec& span) const;
  void arm_event();
  io_uring_sqe* next_sqe();  // null if the kernel takes nothing now
  bool wait();               // false if the ring is beyond use
  void reap();
  void piece_ended(std::uint32_t place, std::int32_t res);
  void free_place(std::uint32_t place);
  void fail(Job* job, int error, std::string text);

  const UringOptions options_;
  const std::shared_ptr<Mailbox> mailbox_;
  io_uring ring_{};
  std::vector<iovec> regions_;  // sorted by address
  bool has_regions_ = false;
  bool event_armed_ = false;
  Mailbox::Closing closing_ = Mailbox::Closing::kNo;
  std::string failure_;

  std::unordered_map<std::int64_t, std::unique_ptr<Job>> jobs_;  // by tag, until they end
  std::deque<Job*> ready_;             // have bytes that no piece was made for
  std::vector<Piece> pieces_;          // `depth` places
  std::vector<std::uint32_t> free_;    // places without a piece
  std::deque<std::uint32_t> again_;    // pieces to be sent again
  std::uint32_t num_flying_ = 0;       // pieces that the kernel has
  std::vector<Ended> ended_;           // not told to the mailbox yet
  std::unique_ptr<HashPool> hashers_;  // last: it ends first, and what it calls is still there
};

}  // namespace attnstore
