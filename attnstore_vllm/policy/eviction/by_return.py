# SPDX-License-Identifier: Apache-2.0
"""Evict what is least likely to return soon. Pure: time is given.

All slots of a key return together or not at all, so they are worth the same. Keys of one lane
stand in the order of their age, and what they are worth rises with age up to some point and falls
from there: the one that is worth least stands at one end or the other. So a decision looks at two
keys of each lane, however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic

from attnstore_vllm.policy.eviction.base import K

KEYS_MAX = 4
"""Keys at one end of a lane that a decision looks at, if none of their slots can go."""
VICTIMS_MAX = 16
"""So many slots of a key are given up before all are looked at again."""


class ByReturn(Generic[K]):
    """The key that is worth least.

    Args:
        lane: of a key: those of one lane differ in their age alone.
        worth: of a key at a time; of those that are worth the same, False goes first.
    """

    moves_on_use = True

    def __init__(
        self, lane: Callable[[K], Hashable], worth: Callable[[K, float], tuple[float, bool]]
    ) -> None:
        self._lane = lane
        self._worth = worth
        self.clear()

    def clear(self) -> None:
        self._lanes: dict[Hashable, OrderedDict[K, None]] = {}  # each oldest first
        self._lane_of: dict[K, Hashable] = {}
        self._poorest: K | None = None
        self._victims_left = 0

    def add(self, key: K) -> None:
        name = self._lane_of[key] = self._lane(key)
        self._lanes.setdefault(name, OrderedDict())[key] = None
        self._poorest = None

    def add_oldest(self, keys: Iterable[K]) -> None:
        """Their age says it."""
        for key in keys:
            self.add(key)

    def use(self, key: K) -> None:
        """A key's age counts from its beginning."""

    def rank(self, key: K) -> None:
        """It may be of another lane, and stands behind those that were there before it: the order
        by age is one by ends of requests then, which a look at both ends can do with."""
        if self._lane(key) != self._lane_of[key]:
            self.remove(key)
            self.add(key)

    def remove(self, key: K) -> None:
        name = self._lane_of.pop(key)
        lane = self._lanes[name]
        del lane[key]
        if not lane:
            del self._lanes[name]
        if key is self._poorest:
            self._poorest = None

    def victim(self, now: float, can_go: Callable[[K], bool]) -> K | None:
        """See Order. Cost: two keys a lane for the first slot of a key, O(1) for those after it."""
        if self._poorest is not None and self._victims_left:
            self._victims_left -= 1
            if can_go(self._poorest):
                return self._poorest
        self._victims_left = VICTIMS_MAX
        found, least = None, (0.0, False)
        for lane in self._lanes.values():
            for end in (iter(lane), reversed(lane)):
                for _, key in zip(range(KEYS_MAX), end, strict=False):
                    if not can_go(key):
                        continue
                    worth = self._worth(key, now)
                    if found is None or worth < least:
                        found, least, self._poorest = key, worth, key
                    break
        return found

    def last(self, now: float) -> K | None:
        """See Order. Of each lane the newest. Cost: a key a lane."""
        newest = (next(reversed(lane)) for lane in self._lanes.values())
        return max(newest, key=lambda key: self._worth(key, now), default=None)

    def worth(self, key: K, now: float) -> float:
        return self._worth(key, now)[0]

    def admits(self, key: K, over: K, now: float) -> bool:
        """Not if it is less likely to return soon than what would have to go.

        So prompts that come once do not push out conversations.
        """
        return self._worth(key, now)[0] >= self._worth(over, now)[0]
