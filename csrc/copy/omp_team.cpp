// SPDX-License-Identifier: Apache-2.0
#include "copy/omp_team.h"

#include <dlfcn.h>

#include <atomic>
#include <initializer_list>

namespace attnstore {

namespace {

void alone(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  body(data);
}

OmpParallel find_parallel() {
  // The one that the model's kernels are bound to: another one's threads would be in the way of
  // its. Several may be loaded, and which one the kernels have the order of loading says: first
  // what is preloaded, then what PyTorch has loaded for all.
  void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  for (const char* name : {"libiomp5.so", "libomp.so", "libgomp.so.1"}) {
    if (found != nullptr) break;
    void* const runtime = dlopen(name, RTLD_NOLOAD | RTLD_NOW);
    if (runtime != nullptr) found = dlsym(runtime, "GOMP_parallel");
  }
  return found != nullptr ? reinterpret_cast<OmpParallel>(found) : alone;
}

std::atomic<OmpParallel>& parallel() {
  static std::atomic<OmpParallel> found{find_parallel()};
  return found;
}

}  // namespace

void on_omp_team(void (*body)(void*), void* data) { parallel().load()(body, data, 0, 0); }

int omp_team_size() {
  std::atomic<int> size{0};
  on_omp_team([](void* data) { ++*static_cast<std::atomic<int>*>(data); }, &size);
  return size;
}

void use_omp_parallel(OmpParallel other) { parallel().store(other); }

}  // namespace attnstore
