# SPDX-License-Identifier: Apache-2.0
"""Least recently used first, and first in, first out: to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic

from attnstore_vllm.policy.eviction.base import K
from attnstore_vllm.policy.lazy_heap import LazyHeap

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
        self._entries: dict[K, tuple[float, int, int]] = {}
        """When each key was used last, as was known when it came here, its number and its rank."""
        self._oldest: dict[int, LazyHeap[K]] = {}
        """By rank."""
        self._newest: dict[int, LazyHeap[K]] = {}
        """By rank, the same with times and numbers negated."""

    def add(self, key: K) -> None:
        self._count += 1
        since, rank = self._since(key), self._rank(key)
        self._entries[key] = since, self._count, rank
        if rank not in self._oldest:
            self._oldest[rank] = LazyHeap(partial(self._age, rank))
            self._newest[rank] = LazyHeap(partial(self._youth, rank))
        self._oldest[rank].push((since, self._count), key)
        self._newest[rank].push((-since, -self._count), key)

    def _age(self, rank: int, key: K) -> tuple[float, int] | None:
        """Its place among the oldest of a rank. It may have been used since it came."""
        entry = self._entries.get(key)
        return (self._since(key), entry[1]) if entry is not None and entry[2] == rank else None

    def _youth(self, rank: int, key: K) -> tuple[float, int] | None:
        entry = self._entries.get(key)
        return (-entry[0], -entry[1]) if entry is not None and entry[2] == rank else None

    def add_oldest(self, keys: Iterable[K]) -> None:
        """Their age says it."""
        for key in keys:
            self.add(key)

    def use(self, key: K) -> None:
        self.add(key)

    def rank(self, key: K) -> None:
        """Its age stays; its rank may be another one."""
        entry = self._entries.get(key)
        if entry is not None and entry[2] != self._rank(key):
            self.add(key)

    def remove(self, key: K) -> None:
        del self._entries[key]

    def victim(self, now: float, can_go: Callable[[K], bool]) -> K | None:
        """See Order. Among the LOOK_MAX oldest of each rank. Cost: O(log keys) for each that is
        looked at, amortized."""
        found = (self._oldest[rank].find(can_go, LOOK_MAX) for rank in sorted(self._oldest))
        return next((key for key in found if key is not None), None)

    def last(self, now: float) -> K | None:
        found = (self._newest[rank].first() for rank in sorted(self._newest, reverse=True))
        return next((key for key in found if key is not None), None)

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
