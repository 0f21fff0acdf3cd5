#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the native tests under each sanitizer, or those named, and runs them. Any report is a
# failure.
set -eu
cd "$(dirname "$0")/../csrc"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
CXX="${CXX:-g++}"
copies="tests/test_copies.cpp page_copier.cpp page_runs.cpp stream_copy.cpp"
copies="$copies omp_team.cpp"
content="tests/test_content.cpp content_index.cpp content_find.cpp content_anchors.cpp"
content="$content prefix_index_sketch.cpp"
words="tests/test_page_words.cpp page_runs.cpp cuda/copy_jobs.cpp"
rotator="page_rotator.cpp moved_tokens.cpp page_runs.cpp omp_team.cpp rotate_block.cpp"
rotator="$rotator rotate_block_avx2.cpp rotate_block_avx512.cpp rotate_block_bf16.cpp"
moves="tests/test_moved_load.cpp $rotator"
turns="tests/test_rotate_words.cpp cuda/rotate_jobs.cpp $rotator"
uring="tests/test_uring.cpp uring_device.cpp uring_loop.cpp mailbox.cpp hash_pool.cpp"
uring="$uring checksum.cpp checksum_avx2.cpp"
if ! printf '#include <liburing.h>\n#include <xxhash.h>\n' | "$CXX" -E -x c++ - >/dev/null 2>&1; then
  echo "sanitize: liburing.h or xxhash.h is missing; the io_uring device is not tested"
  uring=""
fi
# vptr: our code has no virtual functions, and the check reports sound objects when there is no file
# descriptor left, since it opens a pipe to look at them; one test takes them all away.
# -O1: what the optimiser inlines it also hides from the reports.
flags="-std=c++17 -O1 -g -Wall -Wextra -Werror -pthread -fno-omit-frame-pointer"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
for kind in ${*:-address,undefined thread}; do
  recover="-fno-sanitize=vptr -fno-sanitize-recover=all"
  # shellcheck disable=SC2086 # these are lists of words
  "$CXX" $flags -fsanitize="$kind" $recover $copies -o "$out/copies"
  echo "$kind"
  "$out/copies"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $words -o "$out/words"
  "$out/words"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $moves -ldl -o "$out/moves"
  "$out/moves"
  # Bit by bit against another compilation of the same arithmetic: no product and sum in one
  # shellcheck disable=SC2086
  "$CXX" $flags -ffp-contract=off -fsanitize="$kind" $recover $turns -ldl -o "$out/turns"
  "$out/turns"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $content -o "$out/content"
  "$out/content"
  if [ -n "$uring" ]; then
    # shellcheck disable=SC2086
    "$CXX" $flags -fsanitize="$kind" $recover $uring -luring -o "$out/uring"
    "$out/uring"
  fi
done
