# SPDX-License-Identifier: Apache-2.0
"""Whose each slot of a tier is, and which leaves next. Pure: time is given.

The slots stand in groups: those that a run (policy/returns.py) was the last to use. An order says
which run gives up a slot; of its group the deepest chunk goes first, for without it the others
are still a prefix. Chunks may come into a group in another order: one is written at once, another
is refused, and its slot waits for that no longer. So where depths are known, a slot is put where
its depth is. Before all others goes a run whose lease has expired, in every order; those
are found by a heap of the times to look.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.ages import EDGES_S
from attnstore_vllm.policy.eviction.base import Order
from attnstore_vllm.policy.eviction.by_return import by_return
from attnstore_vllm.policy.eviction.lru import Fifo, Lru
from attnstore_vllm.policy.lazy_heap import LazyHeap
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import Run, by_end, unknown_run

GROUPS_MAX = 4
"""Expired groups that a decision looks at, if none of their slots can go ..."""
SLOTS_MAX = 8
"""... and of any group so many slots. What is held or wanted is so by whole groups, mostly."""
OLDEST_SLOTS = 256
"""So many slots that a recovery found stand in one group."""
STALE_MAX = 16
"""A group forgets those that have left it when they are more than these and those left."""
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
    first: int = 0
    """No slot of the group is before this place."""


class Departures:
    """The owners of one tier's slots, and the order in which they leave. A slot is added once. Some
    20 bytes a slot.

    Args:
        order: of runs.
    """

    depth_of: Sequence[int] | None = None
    """By slot, how deep its chunk is in its prompt: kept by who fills the slots, and set before the
    first is added. None: of a run, who came or was used last is the deepest."""
    num_changes = 0
    """How often slots have come or were used, or more is known of a run: as long as this stays, the
    next victim is of the same run, or that has none left."""

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
        self.num_changes += 1
        self._group_of = array("q", [-1]) * self._num_slots
        self.groups: dict[int, _Group] = {}
        self._by_run: dict[Run, _Group] = {}
        self.leases = LazyHeap[int](self._end_of)
        self.expired: OrderedDict[int, _Group] = OrderedDict()
        self._order.clear()

    def run_of(self, slot: int) -> Run | None:
        """The run that the slot is of. None: it is free."""
        group = self.groups.get(self._group_of[slot])
        return group.run if group is not None else None

    def add(self, slot: int, run: Run) -> None:
        """The slot was filled, for this run. Cost: O(1); where it is not the deepest of its run,
        O(log) of the run's slots, and moving them."""
        self.add_all((slot,), run)

    def add_all(self, slots: Sequence[int], run: Run) -> None:
        """These were filled for this run, in this order."""
        group, group_of = self._group(run), self._group_of
        self.num_changes += 1
        if len(slots) > 1 and self.depth_of is not None:
            slots = sorted(slots, key=self.depth_of.__getitem__)
        self._put(group, slots)
        for slot in slots:
            assert group_of[slot] < 0
            group_of[slot] = group.number
        group.num_left += len(slots)
        self._length += len(slots)

    def use(self, slots: Sequence[int], run: Run) -> None:
        """A run uses those of these that are here, in the order of depth. May be said again while
        it does."""
        group_of = self._group_of
        here = [slot for slot in slots if group_of[slot] >= 0]
        if not here:
            return
        self.num_changes += 1
        if not self._order.moves_on_use:
            for slot in here:  # its lease is of all that the run filled, be it used or not
                self.groups[group_of[slot]].run.touch(run.since)
            return
        group, left = self._group(run), dict[int, _Group]()
        number = group.number
        moved = list(dict.fromkeys([slot for slot in here if group_of[slot] != number]))
        self._put(group, moved)
        for slot in moved:
            left[group_of[slot]] = old = self.groups[group_of[slot]]
            old.num_left -= 1
            group_of[slot] = number
        group.num_left += len(moved)
        for old in left.values():
            self._tidy(old)

    def use_again(self, run: Run) -> None:
        """The run uses all that it used last. Cost: O(1)."""
        if self._order.moves_on_use and run in self._by_run:
            self.num_changes += 1
            self._order.use(run)

    def rank(self, run: Run) -> None:
        """The kind of this run has changed. Cost: O(1)."""
        if run in self._by_run:
            self.num_changes += 1
            self._order.rank(run)

    def add_oldest(
        self,
        slots: npt.NDArray[np.int32],
        now: float,
        ends: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Add many of which little is known; of them the first goes first.

        They are as old as can be, until they are used.

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
        self.num_changes += 1
        self._order.add_oldest(runs)
        self._length += len(slots)

    def remove(self, slot: int) -> None:
        """The slot is free, or not to leave now."""
        self.remove_all((slot,))

    def remove_all(self, slots: Sequence[int]) -> None:
        """remove() of each. They are here."""
        groups, group_of = self.groups, self._group_of
        left: dict[int, _Group] = {}
        for slot in slots:
            number = group_of[slot]
            group_of[slot] = -1
            left[number] = group = groups[number]
            group.num_left -= 1
        self._length -= len(slots)
        for group in left.values():
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

        Cost: that of the order, and O(1) amortized.
        """
        run = self._order.last(now)
        if run is None:
            return None
        group = self._by_run[run]
        slots, group_of, number = group.slots, self._group_of, group.number
        while group_of[slots[group.first]] != number:
            group.first += 1
        return slots[group.first]

    def last_of(self, run: Run, can_go: Callable[[int], bool], count: int = 1) -> list[int]:
        """The deepest slots of this run that can go, `count` at most: the deepest first."""
        found: dict[int, None] = {}  # a slot that came back may stand in a group twice
        group, num_held = self._by_run.get(run), 0
        for slot in self._deepest(group) if group is not None else ():
            if can_go(slot):
                found[slot] = None
            else:
                num_held += 1
            if len(found) == count or num_held == SLOTS_MAX:
                break
        return list(found)

    def num_of(self, run: Run) -> int:
        """Slots of this run."""
        group = self._by_run.get(run)
        return group.num_left if group is not None else 0

    def worth(self, run: Run, now: float) -> float:
        """See Order."""
        return self._order.worth(run, now)

    def _expired_victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """A slot that no look-up will find any more. Those that cannot go now do not hide
        others."""
        for number in self.leases.take(now, LEASES_MAX):
            self.expired[number] = self.groups[number]
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
        if group.run.lease is not None:
            self.leases.push(group.run.lease.expires, group.number)

    def _end_of(self, number: int) -> float | None:
        """When the group's lease expires; a use may have made it later."""
        group = self.groups.get(number)
        lease = group.run.lease if group is not None else None
        return lease.expires if lease is not None else None

    def _last(self, group: _Group, can_go: Callable[[int], bool]) -> int | None:
        """The group's deepest slot that can go."""
        return next(filter(can_go, islice(self._deepest(group), SLOTS_MAX)), None)

    def _deepest(self, group: _Group) -> Iterator[int]:
        """The group's slots, the deepest first."""
        slots, group_of, number = group.slots, self._group_of, group.number
        while slots and group_of[slots[-1]] != number:
            slots.pop()
        return (slot for slot in reversed(slots) if group_of[slot] == number)

    def _put(self, group: _Group, slots: Sequence[int]) -> None:
        """Enter slots that are not of the group yet, in the order of depth, where they belong."""
        depths = self.depth_of
        if depths is None or not (slots and group.num_left):
            group.slots.extend(slots)
            return
        ours, group_of, number = group.slots, self._group_of, group.number
        while group_of[ours[-1]] != number:
            ours.pop()
        if depths[slots[0]] >= depths[ours[-1]]:
            ours.extend(slots)
            return
        if len(ours) != group.num_left:  # what has left would be out of order
            self._sweep(group)
        if len(slots) == 1:
            place = bisect_right(group.slots, depths[slots[0]], key=depths.__getitem__)
            group.slots.insert(place, slots[0])
            group.first = min(group.first, place)
        else:
            group.slots = array("i", sorted([*group.slots, *slots], key=depths.__getitem__))
            group.first = 0

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
        self._watch(group)
        return group

    def _tidy(self, group: _Group) -> None:
        """Some slots have left. Cost: O(1) a slot, amortized."""
        if not group.num_left:
            del self.groups[group.number], self._by_run[group.run]
            self.expired.pop(group.number, None)
            self._order.remove(group.run)
        elif len(group.slots) > 2 * group.num_left + STALE_MAX:
            self._sweep(group)

    def _sweep(self, group: _Group) -> None:
        """Let the group forget what has left it. Cost: its slots."""
        left = [*dict.fromkeys(s for s in group.slots if self._group_of[s] == group.number)]
        if self.depth_of is not None:  # a slot that came back may stand where it stood before
            left.sort(key=self.depth_of.__getitem__)
        group.slots, group.first = array("i", left), 0


def departures(name: str, num_slots: int, estimator: ReturnEstimator) -> Departures:
    """Args: name: attnstore, lru or fifo."""
    order: Order[Run]
    match name:
        case "lru":
            order = Lru(lambda run: run.priority, lambda run: run.used_at)
        case "fifo":
            order = Fifo(lambda run: run.priority, lambda run: run.since)
        case "attnstore":
            order = by_return(estimator)
        case _:
            raise AssertionError(f"{name} is no order of eviction")
    return Departures(num_slots, order)
