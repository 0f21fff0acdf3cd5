// SPDX-License-Identifier: Apache-2.0
// The io_uring device under the sanitizers: threads that submit, cancel, poll, wake and close.
//
// No suppressions are needed: a sanitizer does not see what the kernel writes, neither into the
// ring nor into the buffers, so it can only miss a race there, and report none that is not.
// MemorySanitizer would be another matter.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "io/uring_device.h"
#include "tests/check.h"

namespace {

using attnstore::Ended;
using attnstore::Op;
using attnstore::Request;
using attnstore::Span;
using attnstore::UringDevice;
using attnstore::UringOptions;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kRecordBytes = 80 * kPage;  // hashed by the pool, and several pieces
constexpr std::size_t kRecords = 24;

// A file without a name, of `kRecords` records.
int new_file(bool direct) {
  std::string path = std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/var/tmp") +
                     "/attnstore-test-XXXXXX";
  const int fd = mkostemp(path.data(), direct ? O_DIRECT | O_CLOEXEC : O_CLOEXEC);
  CHECK(fd >= 0);
  unlink(path.c_str());
  CHECK(ftruncate(fd, kRecords * kRecordBytes) == 0);
  return fd;
}

UringOptions options(int fd, std::uint32_t depth, int num_hash_threads) {
  return {fd, depth, {}, 16 * kPage, num_hash_threads};
}

std::vector<Ended> wait_for(UringDevice& device, std::size_t count) {
  std::vector<Ended> all;
  while (all.size() < count) {
    for (Ended& one : device.poll(Seconds(10))) all.push_back(std::move(one));
  }
  CHECK(all.size() == count);
  return all;
}

Request sealed_write(std::int64_t tag, std::size_t record, std::byte* memory) {
  return {tag,
          Op::kWrite,
          record * kRecordBytes,
          {{memory, kPage}, {memory + kPage, kRecordBytes - kPage}},
          {{1, 64}, {0, 0}},
          false};
}

Request checked_read(std::int64_t tag, std::size_t record, std::byte* memory) {
  return {tag,
          Op::kRead,
          record * kRecordBytes,
          {{memory, kPage}, {memory + kPage, kRecordBytes - kPage}},
          {},
          true};
}

// Three threads write records of their own, one polls; then all is read back and compared.
void records_come_back(std::uint32_t depth, int num_hash_threads, bool with_regions) {
  const Pages written = pages(kRecords * kRecordBytes);
  const Pages found = pages(kRecords * kRecordBytes);
  std::mt19937_64 random(depth);
  fill(written.get(), kRecords * kRecordBytes, random);
  auto settings = options(new_file(true), depth, num_hash_threads);
  if (with_regions) settings.regions = {{written.get(), kRecords * kRecordBytes}};
  UringDevice device(std::move(settings));
  std::vector<std::thread> writers;
  for (std::size_t first = 0; first < 3; ++first) {
    writers.emplace_back([&, first] {
      for (std::size_t i = first; i < kRecords; i += 3) {
        std::byte* const memory = written.get() + i * kRecordBytes;
        std::memset(memory, 0, kPage);
        CHECK(device.submit({sealed_write(static_cast<std::int64_t>(i), i, memory)}));
        if (i % 4 == 0) device.wake();
      }
    });
  }
  std::map<std::int64_t, attnstore::Checksum> seals;
  for (const Ended& one : wait_for(device, kRecords)) {
    CHECK(one.error == 0 && one.has_checksum);
    seals[one.tag] = one.checksum;
  }
  for (auto& writer : writers) writer.join();
  CHECK(device.submit({{1000, Op::kSync, 0, {}, {}, false}}));
  CHECK(wait_for(device, 1)[0].error == 0);
  std::vector<Request> reads;
  for (std::size_t i = 0; i < kRecords; ++i) {
    reads.push_back(checked_read(static_cast<std::int64_t>(i), i, found.get() + i * kRecordBytes));
  }
  CHECK(device.submit(std::move(reads)));
  for (const Ended& one : wait_for(device, kRecords)) {
    CHECK(one.error == 0 && one.has_checksum && one.checksum == seals[one.tag]);
  }
  CHECK(std::memcmp(written.get(), found.get(), kRecords * kRecordBytes) == 0);
  CHECK(device.close(Seconds(10)) && device.close(Seconds(10)));
  CHECK(!device.submit({checked_read(1, 0, found.get())}));
}

// Everything at once: each request ends exactly once, whatever is done to it.
void cancelled_while_moving(std::uint64_t seed) {
  constexpr std::size_t kRequests = 60;
  std::vector<Pages> memory;
  for (std::size_t i = 0; i < kRequests; ++i) {
    memory.push_back(pages(kRecordBytes));
    std::memset(memory.back().get(), 0, kRecordBytes);
  }
  UringDevice device(options(new_file(true), 4, 2));
  std::atomic<bool> done{false};
  std::thread canceller([&] {
    std::mt19937_64 random(seed);
    while (!done.load()) {
      device.cancel({static_cast<std::int64_t>(random() % kRequests)});
      if (random() % 8 == 0) device.wake();
      std::this_thread::yield();
    }
  });
  for (std::size_t i = 0; i < kRequests; ++i) {
    const auto tag = static_cast<std::int64_t>(i);
    std::byte* const at = memory[i].get();
    CHECK(device.submit(
        {i % 2 == 0 ? sealed_write(tag, i % kRecords, at) : checked_read(tag, i % kRecords, at)}));
  }
  std::map<std::int64_t, int> times;
  for (const Ended& one : wait_for(device, kRequests)) {
    CHECK(one.error == 0 || one.error == ECANCELED);
    CHECK(one.has_checksum == (one.error == 0));
    ++times[one.tag];
  }
  CHECK(times.size() == kRequests);
  done.store(true);
  canceller.join();
  CHECK(device.close(Seconds(10)));
}

// A read of an empty pipe waits for ever; close() gives up on it, the kernel lets it go.
void closed_while_waiting() {
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  const Pages memory = pages(2 * kPage);
  UringDevice device(options(ends[0], 1, 1));
  CHECK(device.submit({{1, Op::kRead, 0, {{memory.get(), kPage}}, {}, true},
                       {2, Op::kRead, 0, {{memory.get() + kPage, kPage}}, {}, true}}));
  std::thread poller([&] { (void)device.poll(Seconds(0.02)); });
  CHECK(device.close(Seconds(0.01)));
  poller.join();
  for (const Ended& one : device.poll(Seconds(0))) CHECK(one.error == ECANCELED);
  close(ends[1]);
}

void errors_are_told() {
  const int full = open("/dev/full", O_RDWR | O_CLOEXEC);
  CHECK(full >= 0);
  const Pages memory = pages(kPage);
  std::memset(memory.get(), 0, kPage);
  {
    UringDevice device(options(full, 2, 1));
    CHECK(device.submit({{1, Op::kWrite, 0, {{memory.get(), kPage}}, {{0, 0}}, false}}));
    const auto ended = wait_for(device, 1);
    CHECK(ended[0].error == ENOSPC && !ended[0].has_checksum && !ended[0].text.empty());
  }
  UringDevice device(options(new_file(false), 2, 0));
  CHECK(
      device.submit({{2, Op::kRead, kRecords * kRecordBytes, {{memory.get(), kPage}}, {}, true}}));
  CHECK(wait_for(device, 1)[0].error == EIO);
}

// Without room for the event, and then for the ring, the constructor throws and leaves nothing.
void refused_by_the_kernel() {
  rlimit before{};
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  for (const rlim_t room : {0, 1}) {
    const int fd = new_file(true);
    const int next = dup(fd);
    close(next);
    const rlimit limit{static_cast<rlim_t>(next) + room, before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    bool refused = false;
    try {
      const UringDevice none(options(fd, 2, 1));
    } catch (const std::system_error&) {
      refused = true;
    }
    CHECK(refused);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(fcntl(fd, F_GETFD) < 0);
  }
}

void page_checksums_stay_inside() {
  const Pages memory = pages(3 * kPage);
  std::memset(memory.get(), 7, 3 * kPage);
  std::vector<std::byte> sums(3 * attnstore::kChecksumBytes);
  attnstore::page_checksums(memory.get(), 3, kPage, kPage - 16, sums.data());
  std::memset(memory.get() + kPage - 16, 0, 16);
  const auto wanted = attnstore::checksum(memory.get(), kPage);
  CHECK(std::memcmp(sums.data(), wanted.data(), wanted.size()) == 0);
}

}  // namespace

int main() {
  for (const std::uint32_t depth : {1U, 3U, 32U}) {
    records_come_back(depth, 2, depth == 3);
  }
  records_come_back(8, 0, true);
  for (std::uint64_t seed = 0; seed < 5; ++seed) cancelled_while_moving(seed);
  for (int round = 0; round < 5; ++round) closed_while_waiting();
  errors_are_told();
  refused_by_the_kernel();
  page_checksums_stay_inside();
  std::puts("uring: well");
  return 0;
}
