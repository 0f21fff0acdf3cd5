# SPDX-License-Identifier: Apache-2.0
"""Least recently used first, and first in, first out: to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Generic

from attnstore_vllm.policy.eviction.base import K

RANK_FACTOR = 1e9
"""Between what keys of two ranks are worth: more than age makes of it."""
AGE_MIN_S = 1e-3
LOOK_MAX = 64
"""Keys of one rank that one decision looks at. Bounds its cost."""


class Lru(Generic[K]):
    """Least recently used first.

    Where a key stands is a matter of its own times, and not of when it came here: a slot that is
    written late comes late into the order of what is clean, and is as old as ever.

    Args:
        rank: of a key; those of a lower one go before those of a higher one.
        since: when a key was used last. It may rise. Of keys of one time who came or was used here
            first goes first.
    """

    moves_on_use = True

    def __init__(
        self, rank: Callable[[K], int], since: Callable[[K], float] = lambda key: 0.0
    ) -> None:
        self._rank = rank
        self._since = since
        self._count = 0
        self.clear()

    def clear(self) -> None:
        self._entries: dict[K, tuple[float, int, K]] = {}
        """The one that counts of each key; others in the heaps are passed over."""
        self._oldest: dict[int, list[tuple[float, int, K]]] = {}
        """By rank, a heap."""
        self._newest: dict[int, list[tuple[float, int, K]]] = {}
        """By rank, a heap of the same with times and numbers negated."""

    def add(self, key: K) -> None:
        self._count += 1
        entry = self._entries[key] = (self._since(key), self._count, key)
        rank = self._rank(key)
        oldest = self._oldest.setdefault(rank, [])
        newest = self._newest.setdefault(rank, [])
        heappush(oldest, entry)
        heappush(newest, (-entry[0], -entry[1], key))
        most = 2 * len(self._entries) + LOOK_MAX
        if len(oldest) > most or len(newest) > most:  # most of it is outdated
            live = [entry for key, entry in self._entries.items() if self._rank(key) == rank]
            newest[:] = [(-since, -number, key) for since, number, key in live]
            oldest[:] = live
            heapify(oldest)
            heapify(newest)

    def add_oldest(self, keys: Iterable[K]) -> None:
        """Their age says it."""
        for key in keys:
            self.add(key)

    def use(self, key: K) -> None:
        self.add(key)

    def rank(self, key: K) -> None:
        """Its age stays."""

    def remove(self, key: K) -> None:
        del self._entries[key]

    def victim(self, now: float, can_go: Callable[[K], bool]) -> K | None:
        """See Order. Among the LOOK_MAX oldest of each rank. Cost: O(log keys) for each that is
        looked at, amortized."""
        for rank in sorted(self._oldest):
            heap, aside = self._oldest[rank], list[tuple[float, int, K]]()
            found = None
            while heap and found is None and len(aside) < LOOK_MAX:
                since, _, key = entry = heap[0]
                if self._entries.get(key) is not entry:
                    heappop(heap)
                elif self._since(key) > since:  # used since it came
                    heappop(heap)
                    self.add(key)
                elif can_go(key):
                    found = key
                else:
                    aside.append(heappop(heap))
            for entry in aside:
                heappush(heap, entry)
            if found is not None:
                return found
        return None

    def last(self, now: float) -> K | None:
        for rank in sorted(self._newest, reverse=True):
            heap = self._newest[rank]
            while heap:
                _, number, key = heap[0]
                entry = self._entries.get(key)
                if entry is not None and entry[1] == -number:
                    return key
                heappop(heap)
        return None

    def worth(self, key: K, now: float) -> float:
        """As if returns fell with age as 1/t, which is what makes this order a good one."""
        return RANK_FACTOR ** self._rank(key) / max(now - self._since(key), AGE_MIN_S)

    def admits(self, key: K, over: K, now: float) -> bool:
        return True


class Fifo(Lru[K]):
    """First in, first out."""

    moves_on_use = False

    def use(self, key: K) -> None:
        """Being used does not help a slot to stay."""
