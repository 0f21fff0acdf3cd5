# SPDX-License-Identifier: Apache-2.0
"""The seam of an order of departure: keys in, keys out.

A key stands for slots that were used together, and is compared by its hash. What it is, an order
need not know: departures.py has runs (policy/returns.py) for keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Order(Protocol[K]):
    """Who gives up a slot. A key is added once."""

    moves_on_use: bool
    """Whether a slot is of who used it last; else of who filled it."""

    def add(self, key: K) -> None:
        """It has slots from now on."""

    def add_oldest(self, keys: Iterable[K]) -> None:
        """Add keys of which nothing is known, before all others; of them the first goes first."""

    def use(self, key: K) -> None:
        """It uses its slots, or gets another one."""

    def rank(self, key: K) -> None:
        """Look at it anew: more is known of it than when it was added."""

    def remove(self, key: K) -> None:
        """It has no slot any more."""

    def clear(self) -> None: ...
    def victim(self, now: float, can_go: Callable[[K], bool]) -> K | None:
        """Which slot is given up, or None if none is found that can be. Changes nothing.

        Args:
            can_go: False if all slots that were looked at are held. Few are.
        """

    def last(self, now: float) -> K | None:
        """Who would leave last, as far as a look at few says; None without keys."""

    def worth(self, key: K, now: float) -> float:
        """Returns a second of a slot of this key, as far as the order knows; above 0."""

    def admits(self, key: K, over: K, now: float) -> bool:
        """Whether a chunk of `key` is worth a slot of `over`, which victim() said."""
