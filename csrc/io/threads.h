// SPDX-License-Identifier: Apache-2.0
// What every thread of ours does first.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <csignal>

namespace attnstore {

// vLLM binds its own threads to single processors, and a new thread inherits the binding of the
// one that makes it. Our threads go wherever there is room.
inline void unbind_this_thread() {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &all);
  // The kernel intersects this with what the process may use; if it refuses, the inherited
  // binding is as good as any.
  (void)sched_setaffinity(0, sizeof(all), &all);
}

// Signals are for the interpreter's main thread: one that a thread of ours took would interrupt
// nothing that waits there. What a thread brings upon itself stays deliverable.
inline void leave_signals_to_others() {
  sigset_t mask;
  sigfillset(&mask);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&mask, own);
  (void)pthread_sigmask(SIG_BLOCK, &mask, nullptr);
}

}  // namespace attnstore
