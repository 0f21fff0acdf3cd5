# SPDX-License-Identifier: Apache-2.0
"""Which chunk leaves a tier when it is full. Pure: events in, decisions out.

The seam is EvictionPolicy. A tier tells its policy what came, what was used and what went, and
asks for a victim among the chunks that can go now. Lru is for the few chunks of DRAM, which are
objects; SlotLru for the millions of NVMe, which are slot numbers.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

LOOK_MAX = 64
"""Chunks that one decision looks at beyond those that cannot go. Bounds its cost."""


class EvictionPolicy(Protocol):
    """Order of departure in one tier. Ids are hashable; an id is added once."""

    def add(self, chunk: Hashable) -> None: ...
    def use(self, chunk: Hashable) -> None: ...
    def remove(self, chunk: Hashable) -> None: ...
    def victim(
        self, can_go: Callable[[Hashable], bool], costs_nothing: Callable[[Hashable], bool]
    ) -> Hashable | None: ...


class Lru:
    """Least recently used first, and among the oldest one that another tier has as well."""

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._oldest_first)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._oldest_first

    def add(self, chunk: Hashable) -> None:
        assert chunk not in self._oldest_first
        self._oldest_first[chunk] = None

    def use(self, chunk: Hashable) -> None:
        self._oldest_first.move_to_end(chunk)

    def remove(self, chunk: Hashable) -> None:
        del self._oldest_first[chunk]

    def victim(
        self, can_go: Callable[[Hashable], bool], costs_nothing: Callable[[Hashable], bool]
    ) -> Hashable | None:
        """The chunk to evict, or None if none can go. Nothing is changed.

        Args:
            can_go: False for a chunk that a transfer holds. Few are held at a time.
            costs_nothing: True if the chunk's bytes stay in another tier.
        Cost: at most LOOK_MAX chunks beyond the held ones.
        """
        oldest = list(islice((c for c in self._oldest_first if can_go(c)), LOOK_MAX))
        return next((c for c in oldest if costs_nothing(c)), oldest[0] if oldest else None)


class Fifo(Lru):
    """First in, first out: a baseline."""

    def use(self, chunk: Hashable) -> None:
        """Being used does not help a chunk to stay."""


class SlotLru:
    """Least recently used first, over slot numbers. Eight bytes a slot, used or not.

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

    def add(self, slot: int) -> None:
        assert self._next[slot] < 0
        self._link(slot)
        self._length += 1

    def use(self, slot: int) -> None:
        self._unlink(slot)
        self._link(slot)

    def remove(self, slot: int) -> None:
        self._unlink(slot)
        self._next[slot] = self._previous[slot] = -1
        self._length -= 1

    def add_oldest(self, slots: npt.NDArray[np.int32]) -> None:
        """Add many at once, before all others, the oldest first."""
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

    def victim(
        self,
        can_go: Callable[[int], bool],
        costs_nothing: Callable[[int], bool] | None = None,
    ) -> int | None:
        """See Lru.victim. Without `costs_nothing` it is the oldest that can go."""
        oldest: int | None = None
        slot, looks = self._next[self._end], 0
        while slot != self._end and looks < LOOK_MAX:
            if can_go(slot):
                if costs_nothing is None or costs_nothing(slot):
                    return slot
                oldest = slot if oldest is None else oldest
                looks += 1
            slot = self._next[slot]
        return oldest

    def _link(self, slot: int) -> None:
        newest = self._previous[self._end]
        self._next[newest] = self._previous[self._end] = slot
        self._previous[slot], self._next[slot] = newest, self._end

    def _unlink(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        assert after >= 0
        self._next[before], self._previous[after] = after, before
