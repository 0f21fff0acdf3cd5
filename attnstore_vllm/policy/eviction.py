# SPDX-License-Identifier: Apache-2.0
"""Which chunk leaves a tier when it is full. Pure: events in, decisions out.

The seam is EvictionPolicy; Lru is its first implementation. A tier tells its policy what came,
what was used and what went, and asks for a victim among the chunks that can go now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Protocol

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
SlotLru = Lru
