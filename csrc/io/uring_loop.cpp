// SPDX-License-Identifier: Apache-2.0
#include "io/uring_loop.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "io/uring_limits.h"

namespace attnstore {

namespace {

// user_data of what is not a piece; a piece's is generation << 32 | place.
constexpr std::uint64_t kEvent = ~std::uint64_t{0};
constexpr std::uint64_t kCancel = kEvent - 1;

std::uint64_t name_of(std::uint32_t place, std::uint32_t generation) {
  return std::uint64_t{generation} << 32 | place;
}

std::vector<iovec> split_regions(std::vector<Span> regions) {
  std::sort(regions.begin(), regions.end(),
            [](const Span& a, const Span& b) { return a.data < b.data; });
  std::vector<iovec> parts;
  for (const Span& region : regions) {
    for (std::uint64_t at = 0; at < region.num_bytes; at += kRegionBytesMax) {
      parts.push_back(
          {region.data + at, std::min<std::uint64_t>(kRegionBytesMax, region.num_bytes - at)});
    }
  }
  return parts;
}

}  // namespace

UringLoop::UringLoop(UringOptions options, std::shared_ptr<Mailbox> mailbox)
    : options_(std::move(options)), mailbox_(std::move(mailbox)) {
  set_up_ring();
  register_regions();
  pieces_.resize(options_.depth);
  for (std::uint32_t place = options_.depth; place > 0; --place) free_.push_back(place - 1);
  if (options_.num_hash_threads > 0) {
    hashers_ = std::make_unique<HashPool>(options_.num_hash_threads,
                                          [box = mailbox_.get()](Job* job) { box->hashed(job); });
  }
}

UringLoop::~UringLoop() {
  hashers_.reset();
  io_uring_queue_exit(&ring_);
  ::close(options_.fd);
}

void UringLoop::set_up_ring() {
  // Room for every piece, as many cancellations, and the event.
  const std::uint32_t entries = 2 * options_.depth + 8;
  int rc = -EINVAL;
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
  rc = io_uring_queue_init(
      entries, &ring_,
      IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
#endif
  if (rc == -EINVAL) rc = io_uring_queue_init(entries, &ring_, IORING_SETUP_CLAMP);  // before 6.1
  if (rc < 0) throw std::system_error(-rc, std::generic_category(), "io_uring_setup");
  rc = io_uring_register_files(&ring_, &options_.fd, 1);
  if (rc < 0) {
    io_uring_queue_exit(&ring_);
    throw std::system_error(-rc, std::generic_category(), "io_uring_register");
  }
}

void UringLoop::register_regions() {
  regions_ = split_regions(options_.regions);
  if (regions_.empty() || regions_.size() > kRegionsMax) return;
  const auto count = static_cast<unsigned>(regions_.size());
  // Refused where RLIMIT_MEMLOCK is small: then the kernel pins the pages of each transfer.
  has_regions_ = io_uring_register_buffers(&ring_, regions_.data(), count) == 0;
}

void UringLoop::run() {
  while (true) {
    take_news();
    dispatch();
    mailbox_->ended(&ended_);
    if (closing_ != Mailbox::Closing::kNo && jobs_.empty()) break;
    arm_event();
    if (!wait()) break;
    reap();
  }
  hashers_.reset();
  mailbox_->stopped(num_flying_ == 0, failure_);
}

void UringLoop::take_news() {
  Mailbox::News news = mailbox_->take();
  for (Request& request : news.requests) begin(std::move(request));
  for (Job* job : news.hashed) hashed(job);
  for (const std::int64_t tag : news.cancels) {
    const auto found = jobs_.find(tag);
    if (found != jobs_.end()) cancel(found->second.get());
  }
  if (news.closing > closing_) closing_ = news.closing;
  if (news.closing == Mailbox::Closing::kNow) cancel_all();
}

// ---- a request's way -------------------------------------------------------------------

void UringLoop::begin(Request request) {
  const std::int64_t tag = request.tag;
  auto owned = std::make_unique<Job>(std::move(request));
  Job* const job = owned.get();
  if (!jobs_.emplace(tag, std::move(owned)).second) {
    ended_.push_back({tag, EINVAL, "the tag is in flight already", false, {}});
    return;
  }
  const bool is_write = job->request.op == Op::kWrite;
  const std::size_t num_bytes = is_write ? bytes_to_hash(*job) : 0;
  if (num_bytes > kHashHereBytes && hashers_ != nullptr) {
    hashers_->push(job);
    return;
  }
  if (num_bytes > 0) hash(*job);
  make_ready(job);
}

void UringLoop::make_ready(Job* job) {
  const bool is_empty = job->num_bytes == 0 && job->request.op != Op::kSync;
  if (job->cancelled) fail(job, ECANCELED, "cancelled before it was begun");
  if (job->cancelled || is_empty) {
    job->all_begun = true;
    finish_if_done(job);
  } else {
    ready_.push_back(job);
  }
}

void UringLoop::hashed(Job* job) {
  if (job->request.op == Op::kWrite) {
    make_ready(job);
  } else {
    finish(job);
  }
}

void UringLoop::cancel(Job* job) {
  if (std::exchange(job->cancelled, true)) return;
  for (std::uint32_t place = 0; job->num_flying > 0 && place < pieces_.size(); ++place) {
    if (pieces_[place].job != job) continue;
    io_uring_sqe* const sqe = next_sqe();
    if (sqe == nullptr) break;  // then they end when the medium says so
    io_uring_prep_rw(IORING_OP_ASYNC_CANCEL, sqe, -1, nullptr, 0, 0);
    sqe->addr = name_of(place, pieces_[place].generation);
    sqe->user_data = kCancel;
  }
  if (std::find(ready_.begin(), ready_.end(), job) != ready_.end()) {
    fail(job, ECANCELED, "cancelled before all of it was begun");
    finish_if_done(job);
  }
}

void UringLoop::cancel_all() {
  std::vector<Job*> all;
  all.reserve(jobs_.size());
  for (const auto& entry : jobs_) all.push_back(entry.second.get());
  for (Job* job : all) cancel(job);
}

// What was not begun of it is dropped; the caller finishes it when nothing of it is in flight.
void UringLoop::fail(Job* job, int error, std::string text) {
  if (job->error != 0) return;  // the first failure says most
  job->error = error;
  job->text = std::move(text);
  const auto found = std::find(ready_.begin(), ready_.end(), job);
  if (found == ready_.end()) return;
  ready_.erase(found);
  job->all_begun = true;
}

void UringLoop::finish_if_done(Job* job) {
  if (!job->all_begun || job->num_flying > 0) return;
  const bool is_read = job->request.op == Op::kRead && job->error == 0;
  const std::size_t num_bytes = is_read ? bytes_to_hash(*job) : 0;
  if (num_bytes > kHashHereBytes && hashers_ != nullptr) {
    hashers_->push(job);
    return;
  }
  if (num_bytes > 0) hash(*job);
  finish(job);
}

void UringLoop::finish(Job* job) {
  Ended ended{job->request.tag, job->error, std::move(job->text), false, job->checksum};
  ended.has_checksum = job->has_checksum && job->error == 0;
  ended_.push_back(std::move(ended));
  jobs_.erase(job->request.tag);
}

// ---- pieces ----------------------------------------------------------------------------

void UringLoop::dispatch() {
  while (!again_.empty() && send(again_.front())) again_.pop_front();
  while (again_.empty() && !free_.empty() && !ready_.empty()) {
    Job* const job = ready_.front();
    const std::uint32_t place = free_.back();
    free_.pop_back();
    Piece& piece = pieces_[place];
    piece.job = job;
    ++piece.generation;
    piece.num_retries = 0;
    piece.at = job->next;
    piece.end = std::min(job->num_bytes, job->next + piece_bytes(*job));
    job->next = piece.end;
    ++job->num_flying;
    job->all_begun = job->next == job->num_bytes;
    if (job->all_begun) ready_.pop_front();
    if (!send(place)) again_.push_back(place);
  }
}

bool UringLoop::send(std::uint32_t place) {
  Piece& piece = pieces_[place];
  Job* const job = piece.job;
  if (job->cancelled || job->error != 0) {
    fail(job, ECANCELED, "cancelled before all of it was moved");
    free_place(place);
    finish_if_done(job);
    return true;
  }
  io_uring_sqe* const sqe = next_sqe();
  if (sqe == nullptr) return false;
  constexpr int kFile = 0;  // the only registered one
  if (job->request.op == Op::kSync) {
    io_uring_prep_fsync(sqe, kFile, IORING_FSYNC_DATASYNC);
  } else {
    set_spans(&piece);
    const bool is_read = job->request.op == Op::kRead;
    const iovec& first = piece.spans.front();
    const std::size_t region = piece.spans.size() == 1 ? region_of(first) : kNoRegion;
    const auto count = static_cast<unsigned>(piece.spans.size());
    if (region == kNoRegion) {
      io_uring_prep_rw(is_read ? IORING_OP_READV : IORING_OP_WRITEV, sqe, kFile, piece.spans.data(),
                       count, file_offset(piece));
    } else {
      io_uring_prep_rw(is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED, sqe, kFile,
                       first.iov_base, static_cast<unsigned>(first.iov_len), file_offset(piece));
      sqe->buf_index = static_cast<std::uint16_t>(region);
    }
  }
  sqe->flags |= IOSQE_FIXED_FILE;
  sqe->user_data = name_of(place, piece.generation);
  ++num_flying_;
  if (io_uring_sq_ready(&ring_) >= kSubmitMax) io_uring_submit(&ring_);
  return true;
}

// A write goes to the kernel whole: if this process is killed, all of it is written or nothing.
std::uint64_t UringLoop::piece_bytes(const Job& job) const {
  if (job.request.op == Op::kWrite) return job.num_bytes;
  return job.request.stride > 0 ? job.request.buffers[0].num_bytes : options_.piece_bytes;
}

std::uint64_t UringLoop::file_offset(const Piece& piece) {
  const Request& request = piece.job->request;
  if (request.stride == 0) return request.offset + piece.at;
  const std::size_t size = request.buffers[0].num_bytes;
  return request.offset + piece.at / size * request.stride + piece.at % size;
}

// The parts of the buffers that bytes [at, end) of the request lie in.
void UringLoop::set_spans(Piece* piece) {
  piece->spans.clear();
  const Request& request = piece->job->request;
  if (request.stride > 0) {  // a piece lies in one buffer, and all are of one size
    const std::size_t size = request.buffers[0].num_bytes;
    piece->spans.push_back({request.buffers[piece->at / size].data + piece->at % size,
                            static_cast<std::size_t>(piece->end - piece->at)});
    return;
  }
  std::uint64_t before = 0;
  for (const Span& buffer : request.buffers) {
    const std::uint64_t from = std::max(piece->at, before);
    const std::uint64_t to = std::min<std::uint64_t>(piece->end, before + buffer.num_bytes);
    if (from < to) piece->spans.push_back({buffer.data + (from - before), to - from});
    before += buffer.num_bytes;
  }
}

std::size_t UringLoop::region_of(const iovec& span) const {
  if (!has_regions_) return kNoRegion;
  const auto address = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at); };
  const auto after = std::upper_bound(
      regions_.begin(), regions_.end(), address(span.iov_base),
      [&](std::uintptr_t at, const iovec& region) { return at < address(region.iov_base); });
  if (after == regions_.begin()) return kNoRegion;
  const auto region = std::prev(after);
  const bool inside =
      address(span.iov_base) + span.iov_len <= address(region->iov_base) + region->iov_len;
  return inside ? static_cast<std::size_t>(region - regions_.begin()) : kNoRegion;
}

void UringLoop::piece_ended(std::uint32_t place, std::int32_t res) {
  Piece& piece = pieces_[place];
  Job* const job = piece.job;
  --num_flying_;
  if ((res == -EAGAIN || res == -EINTR) && ++piece.num_retries <= kRetriesMax) {
    again_.push_back(place);
    return;
  }
  if (res < 0) {
    fail(job, -res, std::strerror(-res));
  } else {
    const auto moved = static_cast<std::uint64_t>(res);
    const bool is_whole = moved == piece.end - piece.at;
    // A transfer goes on from an aligned byte: O_DIRECT takes no other.
    piece.at += is_whole ? moved : moved / kAlignment * kAlignment;
    if (!is_whole && moved >= kAlignment) {
      piece.num_retries = 0;
      again_.push_back(place);
      return;
    }
    if (!is_whole) {
      fail(job, EIO,
           std::to_string(piece.at) + " of " + std::to_string(job->num_bytes) +
               " bytes, then nothing");
    }
  }
  free_place(place);
  finish_if_done(job);
}

void UringLoop::free_place(std::uint32_t place) {
  --pieces_[place].job->num_flying;
  pieces_[place].job = nullptr;
  free_.push_back(place);
}

// ---- the ring --------------------------------------------------------------------------

io_uring_sqe* UringLoop::next_sqe() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe == nullptr && io_uring_submit(&ring_) > 0) sqe = io_uring_get_sqe(&ring_);
  return sqe;
}

void UringLoop::arm_event() {
  if (event_armed_) return;
  io_uring_sqe* const sqe = next_sqe();
  if (sqe == nullptr) return;  // what fills the ring ends, and then there is room
  io_uring_prep_poll_add(sqe, mailbox_->event_fd(), POLLIN);
  sqe->user_data = kEvent;
  event_armed_ = true;
}

bool UringLoop::wait() {
  for (int tries = 0; tries < kWaitRetriesMax; ++tries) {
    const int rc = io_uring_submit_and_wait(&ring_, 1);
    if (rc >= 0 || io_uring_cq_ready(&ring_) > 0) return true;
    if (rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
      failure_ = std::string("io_uring_enter failed: ") + std::strerror(-rc);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));  // the kernel is out of memory
  }
  failure_ = "io_uring_enter takes nothing any more";
  return false;
}

// At most as many as were in flight: news and what has ended must not wait for a busy disk.
void UringLoop::reap() {
  io_uring_cqe* found[kReapMax];
  for (unsigned left = options_.depth + 1; left > 0;) {
    const unsigned count = io_uring_peek_batch_cqe(&ring_, found, std::min(left, kReapMax));
    if (count == 0) break;
    for (unsigned i = 0; i < count; ++i) {
      const std::uint64_t name = found[i]->user_data;
      const std::int32_t res = found[i]->res;
      if (name == kEvent) {
        event_armed_ = false;
      } else if (name != kCancel) {  // how a cancellation went, the piece itself says
        piece_ended(static_cast<std::uint32_t>(name), res);
      }
    }
    io_uring_cq_advance(&ring_, count);
    left -= count;
    dispatch();
  }
}

}  // namespace attnstore
