// SPDX-License-Identifier: Apache-2.0
// The OpenMP threads that the model's own kernels run on, without being built with OpenMP.
#pragma once

namespace attnstore {

// Calls body(data) on all threads of the calling thread's OpenMP team at once, or on the calling
// thread alone if this process has no OpenMP runtime, and returns when all have returned.
//
// On vLLM's CPU build each processor has one of these threads, bound to it and spinning between
// kernels: any other thread would take its time from them.
void on_omp_team(void (*body)(void*), void* data);

// How many threads those are.
int omp_team_size();

// What compilers call for `#pragma omp parallel`. LLVM's and Intel's runtimes have it too.
using OmpParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
// For tests: another one than the runtime's.
void use_omp_parallel(OmpParallel parallel);

}  // namespace attnstore
