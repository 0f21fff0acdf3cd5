# SPDX-License-Identifier: Apache-2.0
"""How a kernel gets its table of pages or tokens: through a ring of page-locked memory that has a
twin on the device. A span of it is used again only when the copies that read it are over.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_WORD_BYTES = 8
_RING_WORDS = 1 << 18
"""Room for some of the largest tables (cuda_batches.py, cuda_moves.py)."""
_ALIGNED_WORDS = 2
"""Tables begin at multiples of 16 bytes, which a thread reads at once."""


class Spans:
    """Spans of a ring of `size` words, given out and taken back in one order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: deque[tuple[int, int]] = deque()
        """(start, stop), the oldest first; none of them wraps around."""

    def take(self, num_words: int) -> int | None:
        """The start of a new span; None if the oldest must be given back first."""
        assert 0 < num_words <= self._size
        start, end = 0, self._size
        if self._taken:
            oldest, start = self._taken[0][0], self._taken[-1][1]
            if start <= oldest:  # the newest have wrapped around
                end = oldest
            elif start + num_words > end:
                start, end = 0, oldest
        if start + num_words > end:
            return None
        self._taken.append((start, start + num_words))
        return start

    def give_back_oldest(self) -> None:
        self._taken.popleft()


class Staged(NamedTuple):
    """Addresses of a table, for the native code."""

    device: int
    host: int
    """0: the device has it already."""


class _Table(NamedTuple):
    stream: int
    words: npt.NDArray[np.int64]
    start: int

    def has(self, words: npt.NDArray[np.int64]) -> bool:
        """Layers come with the same object; moves with another of the same words."""
        return self.words is words or np.array_equal(self.words, words)


class TableRing:
    """Tables on their way to the device."""

    def __init__(self, device: torch.device, num_words: int = _RING_WORDS) -> None:
        self._device = device
        self._host = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        self._twin = torch.empty(num_words, dtype=torch.int64, device=device)
        self._words: npt.NDArray[np.int64] = self._host.numpy()
        self._spans = Spans(num_words)
        self._until: deque[torch.cuda.Event | None] = deque()
        """The end of each span's use; None while its copies are being begun."""
        self._newest: _Table | None = None
        """The table in the newest span, if the device has it or will have it in time."""
        self._staged: _Table | None = None
        """The table that stage() has just written."""

    def stage(self, words: npt.NDArray[np.int64], stream: int) -> Staged:
        """Write the table of a copy that is given to `stream` next; was_given() follows, and, when
        the stream has all of the copy, used_until().

        Waits for the oldest copies if the ring is full. The layers of one load have one table,
        which goes to the device once.

        Args:
            words: flat; not changed afterwards.
        """
        newest, self._newest = self._newest, None
        if newest is not None and newest.stream == stream and newest.has(words):
            self._staged, self._until[-1] = newest._replace(words=words), None
            return Staged(self._address(self._twin, newest.start), 0)
        num_words = -(-len(words) // _ALIGNED_WORDS) * _ALIGNED_WORDS
        while (start := self._spans.take(num_words)) is None:
            self._wait(self._until.popleft())
            self._spans.give_back_oldest()
        self._until.append(None)
        self._words[start : start + len(words)] = words
        self._staged = _Table(stream, words, start)
        return Staged(self._address(self._twin, start), self._address(self._host, start))

    def was_given(self) -> None:
        """The stream took the copy, and so the table is on its way to the device."""
        self._newest = self._staged

    def used_until(self, event: torch.cuda.Event) -> None:
        """`event` was recorded behind the copies that read what was staged since the last call."""
        for i in reversed(range(len(self._until))):
            if self._until[i] is not None:
                break
            self._until[i] = event

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is None:  # its copy, or one beside it, could not be begun
            torch.cuda.synchronize(self._device)
        else:
            event.synchronize()

    @staticmethod
    def _address(memory: torch.Tensor, start: int) -> int:
        return int(memory.data_ptr()) + start * _WORD_BYTES
