# SPDX-License-Identifier: Apache-2.0
"""Which chunk leaves a tier when it is full. Pure: events in, decisions out; time is given.

The seam is EvictionPolicy. A tier tells its policy which slots were filled, used and freed, and
asks for a victim among those that can go now. ByReturn (policy/by_return.py) is what servers use;
Lru and Fifo are there to compare with.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.returns import Run

LOOK_MAX = 64
"""Slots that one decision of Lru looks at. Bounds its cost."""


class EvictionPolicy(Protocol):
    """Order of departure in one tier, by slot number. A slot is added once."""

    def __len__(self) -> int: ...
    def __contains__(self, slot: int) -> bool: ...
    def add(self, slot: int, run: Run) -> None:
        """The slot was filled, for this run."""

    def add_oldest(self, slots: npt.NDArray[np.int32], now: float) -> None:
        """Add many of which nothing is known, before all others; of them the first goes first."""

    def use(self, slots: Sequence[int], run: Run) -> None:
        """A run uses these, in the order of depth. May be said again while it does."""

    def run_of(self, slot: int) -> Run | None:
        """The run that used the slot last, if the policy remembers."""

    def remove(self, slot: int) -> None: ...
    def clear(self) -> None: ...
    def victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """The slot to free, or None if none is found that can go. Nothing is changed.

        Args:
            can_go: False for a slot that a transfer holds. Few are.
        """

    def admits(self, run: Run, slot: int, now: float) -> bool:
        """Whether a chunk of this run is worth the slot that victim() said."""


class Lru:
    """Least recently used first; of one run the deepest first. Eight bytes a slot, used or not.

    A ring: next_[s] is the slot used after s, and slot number `num_slots` its beginning.
    """

    def __init__(self, num_slots: int) -> None:
        self._end = num_slots
        self._next = array("i", [-1]) * (num_slots + 1)
        self._previous = array("i", [-1]) * (num_slots + 1)
        self.clear()

    def __len__(self) -> int:
        return self._length

    def __contains__(self, slot: int) -> bool:
        return self._next[slot] >= 0

    def add(self, slot: int, run: Run) -> None:
        assert self._next[slot] < 0
        self._link(slot)
        self._length += 1

    def use(self, slots: Sequence[int], run: Run) -> None:
        for slot in reversed(slots):
            self._unlink(slot)
            self._link(slot)

    def run_of(self, slot: int) -> Run | None:
        return None

    def remove(self, slot: int) -> None:
        self._unlink(slot)
        self._next[slot] = self._previous[slot] = -1
        self._length -= 1

    def add_oldest(self, slots: npt.NDArray[np.int32], now: float) -> None:
        if not len(slots):
            return
        following, previous = (np.frombuffer(a, np.int32) for a in (self._next, self._previous))
        assert np.all(following[slots] < 0)
        oldest = self._next[self._end]
        following[slots[:-1]], following[slots[-1]] = slots[1:], oldest
        previous[slots[1:]], previous[slots[0]] = slots[:-1], self._end
        self._next[self._end], self._previous[oldest] = int(slots[0]), int(slots[-1])
        self._length += len(slots)

    def clear(self) -> None:
        """Remove all. Cost: all slots."""
        np.frombuffer(self._next, np.int32)[:] = -1
        np.frombuffer(self._previous, np.int32)[:] = -1
        self._next[self._end] = self._previous[self._end] = self._end
        self._length = 0

    def victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """See EvictionPolicy. The oldest that can go, among the LOOK_MAX oldest."""
        slot = self._next[self._end]
        for _ in range(LOOK_MAX):
            if slot == self._end:
                break
            if can_go(slot):
                return slot
            slot = self._next[slot]
        return None

    def admits(self, run: Run, slot: int, now: float) -> bool:
        return True

    def _link(self, slot: int) -> None:
        newest = self._previous[self._end]
        self._next[newest] = self._previous[self._end] = slot
        self._previous[slot], self._next[slot] = newest, self._end

    def _unlink(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        assert after >= 0
        self._next[before], self._previous[after] = after, before


class Fifo(Lru):
    """First in, first out."""

    def use(self, slots: Sequence[int], run: Run) -> None:
        """Being used does not help a slot to stay."""
