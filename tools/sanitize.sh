#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the native tests under each sanitizer, or those named, and runs them. Any report is a
# failure.
set -eu
cd "$(dirname "$0")/../csrc"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
CXX="${CXX:-g++}"
copies="tests/test_copies.cpp copy/page_copier.cpp copy/page_runs.cpp copy/stream_copy.cpp"
copies="$copies copy/omp_team.cpp"
content="tests/test_content.cpp content/content_index.cpp content/content_find.cpp"
content="$content content/content_find_all.cpp"
content="$content content/content_anchors.cpp index/prefix_index_sketch.cpp"
codec="tests/test_codec.cpp codec/lossless.cpp codec/packed.cpp codec/planes.cpp"
codec="$codec codec/prefix_code.cpp"
quantized="tests/test_quantized.cpp codec/quantized.cpp"
encoded="tests/test_encoded.cpp codec/page_codec.cpp copy/encoded_copier.cpp"
encoded="$encoded copy/page_runs.cpp copy/stream_copy.cpp copy/omp_team.cpp"
cells="tests/test_code_words.cpp cuda/copy_jobs.cpp copy/page_runs.cpp codec/page_codec.cpp"
keys="tests/test_chunk_keys.cpp index/chunk_keys.cpp index/blake3.cpp"
words="tests/test_page_words.cpp copy/page_runs.cpp cuda/copy_jobs.cpp"
rotator="rotate/page_rotator.cpp rotate/moved_tokens.cpp copy/page_runs.cpp copy/omp_team.cpp"
rotator="$rotator rotate/rotate_block.cpp rotate/rotate_block_avx2.cpp"
rotator="$rotator rotate/rotate_block_avx512.cpp rotate/rotate_block_bf16.cpp"
moves="tests/test_moved_load.cpp $rotator"
turns="tests/test_rotate_words.cpp cuda/rotate_jobs.cpp $rotator"
uring="tests/test_uring.cpp io/uring_device.cpp io/uring_loop.cpp io/mailbox.cpp io/hash_pool.cpp"
uring="$uring io/checksum.cpp io/checksum_avx2.cpp"
# The C++ of the CUDA half runs in Python, over a fake driver (tests/cuda_stories.py).
python="$(cd .. && pwd)/.venv/bin/python"
stories=60
if ! "$python" -c "import torch, pybind11" >/dev/null 2>&1; then
  echo "sanitize: .venv has no PyTorch (make setup); the CUDA half is not tested"
  stories=0
fi
if ! printf '#include <liburing.h>\n#include <xxhash.h>\n' | "$CXX" -E -x c++ - >/dev/null 2>&1; then
  echo "sanitize: liburing.h or xxhash.h is missing; the io_uring device is not tested"
  uring=""
fi
# vptr: our code has no virtual functions, and the check reports sound objects when there is no file
# descriptor left, since it opens a pipe to look at them; one test takes them all away.
# -O1: what the optimiser inlines it also hides from the reports.
flags="-I. -std=c++17 -O1 -g -Wall -Wextra -Werror -pthread -fno-omit-frame-pointer"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
# shellcheck disable=SC2048 # words
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
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $codec -o "$out/codec"
  "$out/codec" "${ATTNSTORE_CODEC_INPUTS:-20000}"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $keys -o "$out/keys"
  "$out/keys"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $quantized -o "$out/quantized"
  "$out/quantized" "${ATTNSTORE_CODEC_INPUTS:-20000}"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $encoded -ldl -o "$out/encoded"
  "$out/encoded" "${ATTNSTORE_CODEC_INPUTS:-20000}"
  # shellcheck disable=SC2086
  "$CXX" $flags -fsanitize="$kind" $recover $cells -o "$out/cells"
  "$out/cells" "${ATTNSTORE_CODEC_INPUTS:-20000}"
  # Not under ThreadSanitizer: one thread calls it, and Python is not built for that.
  if [ "$stories" -gt 0 ] && [ "$kind" != thread ]; then
    (
      cd ..
      export ATTNSTORE_FAKE_FLAGS="-O1 -fno-omit-frame-pointer -fsanitize=$kind $recover"
      # Much of Python lives until its end, and its own allocator would hide what is freed.
      export ASAN_OPTIONS="detect_leaks=0:strict_string_checks=1" PYTHONMALLOC=malloc PYTHONPATH=.
      "$python" -m tests.fake_driver >/dev/null # compiled without the sanitizer's own library
      LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so) \
$("$CXX" -print-file-name=libstdc++.so)" \
        "$python" -m tests.cuda_stories --stories "$stories" --jobs 1
    )
  fi
  if [ -n "$uring" ]; then
    # shellcheck disable=SC2086
    "$CXX" $flags -fsanitize="$kind" $recover $uring -luring -o "$out/uring"
    "$out/uring"
  fi
done
