# SPDX-License-Identifier: Apache-2.0
"""Whose each slot of a tier is, and which leaves next; the order that servers use. Pure: time is
given.

The slots stand in groups: those that a run (policy/runs.py) was the last to use. An order says
which run gives up a slot; of its group the deepest chunk goes first, for without it the others
are still a prefix. Before all others goes a run whose lease has expired, whatever the order; those
are found by a heap of the times to look.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.eviction.base import K, Order
from attnstore_vllm.policy.eviction.lru import Fifo, Lru
from attnstore_vllm.policy.runs import (
    EDGES_S,
    ENDED_PRIORITY,
    ReturnEstimator,
    Run,
    by_end,
    unknown_run,
)

KEYS_MAX = 4
"""Keys at one end of a lane that a decision looks at, if none of their slots can go."""
VICTIMS_MAX = 16
"""So many slots of a key are given up before all are looked at again."""


class ByReturn(Generic[K]):
    """The key that is least likely to return soon.

    All slots of a key return together or not at all, so they are worth the same. Keys of one lane
    stand in the order of their age, and what they are worth rises with age up to some point and
    falls from there: the one that is worth least stands at one end or the other. So a decision
    looks at two keys of each lane, however many there are.

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


GROUPS_MAX = 4
"""Expired groups that a decision looks at, if none of their slots can go ..."""
SLOTS_MAX = 8
"""... and of any group so many slots. What is held or wanted is so by whole groups, mostly."""
OLDEST_SLOTS = 256
"""So many slots that a recovery found stand in one group."""
STALE_MAX = 16
"""A group forgets those that have left it when they are more than these and those left."""
PRIORITY_FACTORS = {ENDED_PRIORITY: 1e-30, -2: 1 / 4096, -1: 1 / 16, 0: 1.0, 1: 16.0}
"""Factors of a run's worth, by priority. A factor and not an order: worth falls with age, so what
nobody comes back to leaves in the end, whatever somebody said of it. What has ended is worth
less than anything else, whatever its age."""
LEASES_MAX = 32
"""Leases that one decision looks at."""


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    run: Run
    slots: array[int] = field(default_factory=lambda: array("i"))
    """By depth; those that have left the group are still in it, until they are met."""
    num_left: int = 0
    """Slots that are still of the group."""


class Departures:
    """The owners of one tier's slots, and the order in which they leave. A slot is added once. Some
    20 bytes a slot.

    Args:
        order: of runs.
    """

    def __init__(self, num_slots: int, order: Order[Run]) -> None:
        self._order = order
        self._num_slots = num_slots
        self.clear()

    def __len__(self) -> int:
        return self._length

    def __contains__(self, slot: int) -> bool:
        return self._group_of[slot] >= 0

    def clear(self) -> None:
        """Remove all. Cost: all slots."""
        self._length = 0
        self._opened = 0
        self._group_of = array("q", [-1]) * self._num_slots
        self.groups: dict[int, _Group] = {}
        self._by_run: dict[Run, _Group] = {}
        self.leases: list[tuple[float, int]] = []  # a heap: when to look at which group
        self.expired: OrderedDict[int, _Group] = OrderedDict()
        self._order.clear()

    def run_of(self, slot: int) -> Run | None:
        """The run that the slot is of. None: it is free."""
        group = self.groups.get(self._group_of[slot])
        return group.run if group is not None else None

    def add(self, slot: int, run: Run) -> None:
        """The slot was filled, for this run."""
        self.add_all((slot,), run)

    def add_all(self, slots: Sequence[int], run: Run) -> None:
        """These were filled for this run, the first of them first."""
        group, group_of = self._group(run), self._group_of
        for slot in slots:
            assert group_of[slot] < 0
            group_of[slot] = group.number
        group.slots.extend(slots)
        group.num_left += len(slots)
        self._length += len(slots)

    def use(self, slots: Sequence[int], run: Run) -> None:
        """A run uses those of these that are here, in the order of depth. May be said again while
        it does."""
        group_of = self._group_of
        here = [slot for slot in slots if group_of[slot] >= 0]
        if not here:
            return
        if not self._order.moves_on_use:
            for slot in here:
                self.groups[group_of[slot]].run.use(run.since)
            return
        group, left = self._group(run), dict[int, _Group]()
        number = group.number
        for slot in here:
            before = group_of[slot]
            if before != number:
                left[before] = old = self.groups[before]
                old.num_left -= 1
                group_of[slot] = number
                group.slots.append(slot)
                group.num_left += 1
        for old in left.values():
            self._tidy(old)

    def use_again(self, run: Run) -> None:
        """The run uses all that it used last. Cost: O(1)."""
        if self._order.moves_on_use and run in self._by_run:
            self._order.use(run)

    def rank(self, run: Run) -> None:
        """The kind of this run has changed. Cost: O(1)."""
        if run in self._by_run:
            self._order.rank(run)

    def add_oldest(
        self,
        slots: npt.NDArray[np.int32],
        now: float,
        ends: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Add many of which little is known; of them the first goes first.

        They are as old as can be, until somebody uses them.

        Args:
            ends: [len(slots)] when each expires that is not used till then; infinite: never.
                None: none does. It may be up to a sixteenth of its time earlier.
        """
        group_of = np.frombuffer(self._group_of, np.int64)
        assert np.all(group_of[slots] < 0)
        oldest = unknown_run(now - EDGES_S[-1])
        runs = []
        for chosen, lease in by_end(ends, now) if ends is not None else ((..., None),):
            ended_so = slots[chosen]
            for start in range(0, len(ended_so), OLDEST_SLOTS):
                part = ended_so[start : start + OLDEST_SLOTS]
                group = self._open(replace(oldest, lease=lease))
                group.slots = array("i", part[::-1].astype(np.int32).tobytes())
                group.num_left = len(part)
                group_of[part] = group.number
                runs.append(group.run)
        self._order.add_oldest(runs)
        self._length += len(slots)

    def remove(self, slot: int) -> None:
        """The slot is free, or not to leave now."""
        group = self.groups[self._group_of[slot]]
        self._group_of[slot] = -1
        self._length -= 1
        group.num_left -= 1
        self._tidy(group)

    def victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """The slot to free, or None if none is found that can go. Nothing is changed.

        Args:
            can_go: False for a slot that a transfer holds. Few are.
        Cost: that of the order.
        """
        slot = self._expired_victim(now, can_go) if self.leases or self.expired else None
        if slot is not None:
            return slot
        found: dict[Run, int] = {}

        def has_one(run: Run) -> bool:
            slot = self._last(self._by_run[run], can_go)
            if slot is not None:
                found[run] = slot
            return slot is not None

        run = self._order.victim(now, has_one)
        return found[run] if run is not None else None

    def admits(self, run: Run, slot: int, now: float) -> bool:
        """Whether a chunk of this run is worth the slot that victim() said."""
        held = self.run_of(slot)
        return held is None or self._order.admits(run, held, now)

    def last(self, now: float) -> int | None:
        """The slot that would leave last: of its run the first. None without slots.

        Cost: that of the order, and a look at each of the run's slots that have left.
        """
        run = self._order.last(now)
        if run is None:
            return None
        group = self._by_run[run]
        return next(slot for slot in group.slots if self._group_of[slot] == group.number)

    def num_of(self, run: Run) -> int:
        """Slots of this run."""
        group = self._by_run.get(run)
        return group.num_left if group is not None else 0

    def worth(self, run: Run, now: float) -> float:
        """See Order."""
        return self._order.worth(run, now)

    def _expired_victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """A slot that nobody will find any more. Those that cannot go now do not hide others."""
        for _ in range(LEASES_MAX):
            if not self.leases or self.leases[0][0] > now:
                break
            group = self.groups.get(heappop(self.leases)[1])
            if group is not None and group.run.has_expired(now):
                self.expired[group.number] = group
            elif group is not None:
                self._watch(group)
        for group in list(islice(self.expired.values(), GROUPS_MAX)):
            if not group.run.has_expired(now):  # used again meanwhile
                del self.expired[group.number]
                self._watch(group)
                continue
            slot = self._last(group, can_go)
            if slot is not None:
                return slot
            self.expired.move_to_end(group.number)
        return None

    def _watch(self, group: _Group) -> None:
        """Look at the group when its lease may have expired. Cost: O(log groups), amortized."""
        lease = group.run.lease
        if lease is None:
            return
        heappush(self.leases, (lease.expires, group.number))
        if len(self.leases) > 2 * len(self.groups) + STALE_MAX:
            live = {number for _, number in self.leases} & self.groups.keys()
            leases = ((number, self.groups[number].run.lease) for number in live)
            self.leases = [(lease.expires, number) for number, lease in leases if lease]
            heapify(self.leases)

    def _last(self, group: _Group, can_go: Callable[[int], bool]) -> int | None:
        """The group's deepest slot that can go."""
        slots, group_of, number = group.slots, self._group_of, group.number
        while slots and group_of[slots[-1]] != number:
            slots.pop()
        if not slots or can_go(slots[-1]):
            return slots[-1] if slots else None
        ours = (slot for slot in reversed(slots) if group_of[slot] == number)
        return next((slot for slot in islice(ours, 1, SLOTS_MAX) if can_go(slot)), None)

    def _group(self, run: Run) -> _Group:
        group = self._by_run.get(run)
        if group is None:
            group = self._open(run)
            self._order.add(run)
        else:
            self._order.use(run)
        return group

    def _open(self, run: Run) -> _Group:
        self._opened += 1
        group = self._by_run[run] = self.groups[self._opened] = _Group(self._opened, run)
        if run.lease is not None:
            self._watch(group)
        return group

    def _tidy(self, group: _Group) -> None:
        """Some slots have left. Cost: O(1) a slot, amortized."""
        if not group.num_left:
            del self.groups[group.number], self._by_run[group.run]
            self.expired.pop(group.number, None)
            self._order.remove(group.run)
        elif len(group.slots) > 2 * group.num_left + STALE_MAX:
            left = dict.fromkeys(s for s in group.slots if self._group_of[s] == group.number)
            group.slots = array("i", left)


def by_return(estimator: ReturnEstimator) -> ByReturn[Run]:
    """The order that servers use. Of each kind the runs of one priority stand apart, in a lane of
    their own: what they are worth is multiplied by a factor."""

    def worth(run: Run, now: float) -> tuple[float, bool]:
        factor = PRIORITY_FACTORS[run.priority]
        # Of one request, what others share is before what is its own, and stays.
        return factor * estimator.worth(run.kind, now - run.since), run.is_shared

    return ByReturn(lambda run: (run.kind, run.priority), worth)


def departures(name: str, num_slots: int, estimator: ReturnEstimator) -> Departures:
    """Args: name: attnstore, lru or fifo."""
    order: Order[Run]
    match name:
        case "lru":
            order = Lru(lambda run: run.priority, lambda run: run.since)
        case "fifo":
            order = Fifo(lambda run: run.priority, lambda run: run.since)
        case _:
            order = by_return(estimator)
    return Departures(num_slots, order)
