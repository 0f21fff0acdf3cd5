# SPDX-License-Identifier: Apache-2.0
"""Keys by rank, the lowest first, where ranks change often and are asked for seldom. Pure.

The owner keeps the ranks. The heap has an entry of the rank that a key had, and learns late that it
has risen or that the key has left:

    entry         the rank is now   when it is met
    (rank, key)   the same          it counts
                  higher            it is put where it belongs
                  lower             forgotten: the owner has pushed the lower one
                  None              forgotten: the key has left

So a key that is renewed again and again costs nothing before its old rank is met, and has one
entry. What keys that left and came again have left behind is thrown away when it is most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

STALE_MAX = 16
"""The heap is tidied when it has more than these and twice what it had after the last time."""
SETTLED_MAX = 1024
"""Entries that one find() puts right. How many have gone stale since the last one is not for its
caller to say: requests by the hundred may leave between two."""


class LazyHeap(Generic[K]):
    """See the module. Cost of a call: O(log keys), amortized. Keys of one rank are compared.

    Args:
        rank: of a key now; None: it has left. The owner pushes a key that comes or falls.
    """

    def __init__(self, rank: Callable[[K], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, K]] = []
        self._entries_max = STALE_MAX

    def __len__(self) -> int:
        """Entries. At most STALE_MAX and twice the keys that there were at some time."""
        return len(self._heap)

    def clear(self) -> None:
        self._heap.clear()

    def push(self, rank: Any, key: K) -> None:
        """This is its rank now. May be said again."""
        self.push_all(((rank, key),))

    def push_all(self, entries: Iterable[tuple[Any, K]]) -> None:
        """push() of each."""
        heap = self._heap
        for entry in entries:
            heappush(heap, entry)
        if len(heap) > self._entries_max:
            ranks = {key: self._rank(key) for _, key in heap}
            self._heap = [(rank, key) for key, rank in ranks.items() if rank is not None]
            heapify(self._heap)
            self._entries_max = 2 * len(self._heap) + STALE_MAX

    def first(self) -> K | None:
        """The key of the lowest rank. It stays."""
        while self._heap:
            if self._settle():
                return self._heap[0][1]
        return None

    def is_due(self, until: Any) -> bool:
        """Whether take() has something to look at. Cost: O(1)."""
        return bool(self._heap) and self._heap[0][0] <= until

    def take(self, until: Any, looks: int) -> list[K]:
        """Take out keys whose rank is `until` at most. The owner lets them leave, or pushes them.

        Args:
            looks: entries that are looked at, at most: what is left is there next time.
        """
        taken: dict[K, None] = {}  # a key may have two entries
        for _ in range(looks):
            if not self.is_due(until):
                break
            if self._settle():
                taken[heappop(self._heap)[1]] = None
        return list(taken)

    def find(self, can_go: Callable[[K], bool], looks: int, before: Any = None) -> K | None:
        """The first of the lowest keys that can go. It stays, and so do those that cannot.

        Args:
            looks: keys that are asked about, at most.
            before: the rank is lower than this.
        Returns None also where SETTLED_MAX entries did not count: the next call goes on.
        """
        found: K | None = None
        aside: list[tuple[Any, K]] = []
        settled = 0
        while self._heap and len(aside) < looks and settled < SETTLED_MAX:
            if not self._settle():
                settled += 1
                continue
            rank, key = self._heap[0]
            if before is not None and not rank < before:
                break
            if can_go(key):
                found = key
                break
            aside.append(heappop(self._heap))
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def _settle(self) -> bool:
        """Whether the lowest entry counts. If not, it is put where it belongs, or forgotten."""
        rank, key = self._heap[0]
        now = self._rank(key)
        if now is None or now < rank:
            heappop(self._heap)
            return False
        if now != rank:
            heapreplace(self._heap, (now, key))
            return False
        return True
