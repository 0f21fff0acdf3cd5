# SPDX-License-Identifier: Apache-2.0
"""Least recently used first, and first in, first out: to compare with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic

from attnstore_vllm.policy.eviction.base import K

RANK_FACTOR = 1e9
"""Between what keys of two ranks are worth: more than age makes of it."""
AGE_MIN_S = 1e-3
LOOK_MAX = 64
"""Keys of one rank that one decision looks at. Bounds its cost."""


class Lru(Generic[K]):
    """Least recently used first.

    Args:
        rank: of a key; those of a lower one go before those of a higher one.
        since: when a key came.
    """

    moves_on_use = True

    def __init__(
        self, rank: Callable[[K], int], since: Callable[[K], float] = lambda key: 0.0
    ) -> None:
        self._rank = rank
        self._since = since
        self._oldest_first: dict[int, OrderedDict[K, None]] = {}

    def add(self, key: K) -> None:
        self._of_rank(key)[key] = None

    def add_oldest(self, keys: Iterable[K]) -> None:
        for key in reversed(list(keys)):
            self.add(key)
            self._of_rank(key).move_to_end(key, last=False)

    def use(self, key: K) -> None:
        self._of_rank(key).move_to_end(key)

    def rank(self, key: K) -> None:
        """Its age stays."""

    def remove(self, key: K) -> None:
        del self._of_rank(key)[key]

    def clear(self) -> None:
        self._oldest_first.clear()

    def victim(self, now: float, can_go: Callable[[K], bool]) -> K | None:
        """See Order. Among the LOOK_MAX oldest of each rank."""
        for rank in sorted(self._oldest_first):
            for _, key in zip(range(LOOK_MAX), self._oldest_first[rank], strict=False):
                if can_go(key):
                    return key
        return None

    def last(self, now: float) -> K | None:
        ranks = [rank for rank, keys in self._oldest_first.items() if keys]
        return next(reversed(self._oldest_first[max(ranks)])) if ranks else None

    def worth(self, key: K, now: float) -> float:
        """As if returns fell with age as 1/t, which is what makes this order a good one."""
        return RANK_FACTOR ** self._rank(key) / max(now - self._since(key), AGE_MIN_S)

    def admits(self, key: K, over: K, now: float) -> bool:
        return True

    def _of_rank(self, key: K) -> OrderedDict[K, None]:
        return self._oldest_first.setdefault(self._rank(key), OrderedDict())


class Fifo(Lru[K]):
    """First in, first out."""

    moves_on_use = False

    def use(self, key: K) -> None:
        """Being used does not help a slot to stay."""
