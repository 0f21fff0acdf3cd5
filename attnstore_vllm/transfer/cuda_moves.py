# SPDX-License-Identifier: Apache-2.0
"""Loads of single tokens at other positions on CUDA: what CpuEngine.move is on the CPU.

The kernel reads page-locked memory in place, turns K by the difference of the positions, and writes
to the blocks (csrc/cuda/rotate_words.h). Its table has six numbers for each token, and the angles
of each distance that tokens are moved by; it goes through the ring that loads have.
"""

from __future__ import annotations

from typing import Any

from attnstore_vllm.transfer.cuda_tables import TableRing
from attnstore_vllm.transfer.plan import Moved

# NEVER MEASURED: no GPU has run this. More than the copy kernel's, since it computes as well.
THREAD_BLOCKS = 64
"""CTAs of 128 threads each."""
WORDS_AT_ONCE = 1 << 16
"""The most that one table may have; a quarter of the ring."""
_WORDS_PER_TOKEN = 3
_TOKENS, _SHIFT = 2, 5
"""Columns of Moved."""


class TokenMover:
    """Appends moves of tokens to one stream.

    Args:
        native: a PageRotator of _native_cuda.
        num_pairs: of dims that turn.
    """

    def __init__(self, native: Any, num_pairs: int) -> None:
        self._native = native
        self._angle_words = -(-num_pairs // 2) * 2  # two floats a word, two words aligned
        self.thread_blocks = THREAD_BLOCKS
        self.words_at_once = WORDS_AT_ONCE

    def check(self, moved: Moved, layers: range) -> None:
        """Raises IndexError for what does not exist."""
        assert layers.step == 1
        self._native.check(moved, layers.start, layers.stop)

    def give(
        self, moved: Moved, layers: range, ring: TableRing, stream: int, failed: int = 0
    ) -> None:
        """Append the move to `stream`; `ring` is that of its tables. Nothing of it can fail on the
        device.

        Raises: IndexError, before anything is given, for what does not exist; RuntimeError if CUDA
        refuses it.
        """
        self.check(moved, layers)
        if not len(layers):
            return
        for some in self._parts(moved):
            table = self._native.table(some)
            staged = ring.stage(table.words, stream)
            self._native.load(
                table,
                layers.start,
                layers.stop,
                staged.device,
                staged.host,
                self.thread_blocks,
                stream,
            )
            ring.was_given()

    def _parts(self, moved: Moved) -> list[Moved]:
        """In their order; the table of each has at most `words_at_once` words, or one run."""
        if not len(moved):
            return []
        turns = moved[:, _SHIFT] != 0
        turns[1:] &= moved[1:, _SHIFT] != moved[:-1, _SHIFT]  # one turn for neighbours
        words = moved[:, _TOKENS] * _WORDS_PER_TOKEN + turns * self._angle_words
        parts, start, total = [], 0, 0
        # What a part has besides: the turn that its first run shares with the one before it, and
        # the word that aligns the angles.
        most = self.words_at_once - self._angle_words - 1
        for i, count in enumerate(words.tolist()):
            if i > start and total + count > most:
                parts.append(moved[start:i])
                start, total = i, 0
            total += count
        return [*parts, moved[start:]]
