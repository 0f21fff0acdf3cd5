// SPDX-License-Identifier: Apache-2.0
// A function marked so is compiled for a newer processor as well, and chosen when it is loaded.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTNSTORE_PER_PROCESSOR __attribute__((target_clones("default", "arch=haswell")))
#else  // under a sanitizer the choice would be made before its library is ready
#define ATTNSTORE_PER_PROCESSOR
#endif
