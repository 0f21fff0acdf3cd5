// SPDX-License-Identifier: Apache-2.0
#include "omp_team.h"

#include <dlfcn.h>

#include <atomic>
#include <initializer_list>

namespace attnstore {

namespace {

void alone(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  body(data);
}

OmpParallel find_parallel() {
  for (const char* name : {"libgomp.so.1", "libiomp5.so", "libomp.so"}) {
    // Only the one that PyTorch has loaded: another one's threads would be in the way of these.
    void* const runtime = dlopen(name, RTLD_NOLOAD | RTLD_NOW);
    void* const found = runtime != nullptr ? dlsym(runtime, "GOMP_parallel") : nullptr;
    if (found != nullptr) return reinterpret_cast<OmpParallel>(found);
  }
  return alone;
}

std::atomic<OmpParallel>& parallel() {
  static std::atomic<OmpParallel> found{find_parallel()};
  return found;
}

}  // namespace

void on_omp_team(void (*body)(void*), void* data) { parallel().load()(body, data, 0, 0); }

void use_omp_parallel(OmpParallel other) { parallel().store(other); }

}  // namespace attnstore
