// SPDX-License-Identifier: Apache-2.0
// clock_gettime() for a process that is started with this library in LD_PRELOAD. Whoever asks for
// the time over and over within microseconds is polling, and sleeps a little each time.
//
// Mooncake's client waits for the end of a transfer so, and takes a core meanwhile. This is for the
// child process that owns the client, and for no other. It needs nothing of Python.

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

namespace {

constexpr long POLLING_NS = 5'000;  // a question so soon after the one before is a poll
constexpr int POLLS = 32;           // in a row: about as many microseconds
constexpr long PAUSE_NS = 20'000;   // the timer's slack makes about 70'000 of it

thread_local long last = 0;
thread_local int polls = 0;

int read_clock(clockid_t clock, timespec* now) {
  return static_cast<int>(syscall(SYS_clock_gettime, clock, now));
}

long nanoseconds(const timespec& time) { return time.tv_sec * 1'000'000'000L + time.tv_nsec; }

}  // namespace

extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock,
                                                                    timespec* now) noexcept {
  const int result = read_clock(clock, now);
  if (clock != CLOCK_REALTIME || result != 0) {
    return result;
  }
  const long since = nanoseconds(*now) - last;
  if (since < 0 || since >= POLLING_NS) {
    polls = 0;
  } else if (polls < POLLS) {
    ++polls;
  } else {
    const int error = errno;
    const timespec pause{0, PAUSE_NS};
    nanosleep(&pause, nullptr);
    errno = error;
    read_clock(clock, now);
  }
  last = nanoseconds(*now);
  return result;
}
