# SPDX-License-Identifier: Apache-2.0
"""Evict what is least likely to return soon. Pure: time is given.

The slots of a tier stand in groups: those that a run (policy/returns.py) was the last to use.
All chunks of a group return together or not at all, so they are worth the same; of the group that
is worth least the deepest chunk goes first, for without it the others are still a prefix.

Runs of one kind stand in the order of their age, and what they are worth rises with age up to
some point and falls from there: the one that is worth least stands at one end or the other. So a
decision looks at two groups of each kind, however many there are.

Of each kind the runs of one priority stand apart: what they are worth is multiplied by a factor. A
run whose lease has expired is worth nothing; those are found by a heap of the times to look.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.returns import (
    EDGES_S,
    NO_TERMS,
    TURNS_MAX,
    Before,
    Lease,
    ReturnEstimator,
    Run,
    Terms,
    kind_of,
    lease_for,
    unknown_run,
)

GROUPS_MAX = 4
"""Groups at one end of a kind that a decision looks at, if none of their chunks can go ..."""
CHUNKS_MAX = 8
"""... and of a group so many chunks. What is held or wanted is so by whole groups, mostly."""


OLDEST_SLOTS = 256
"""Of what a recovery found, so many stand in one group."""
STALE_MAX = 16
"""A group forgets those that have left it when they are more than these and those left."""
VICTIMS_MAX = 16
"""So many slots of a group are given up before all are looked at again."""
PRIORITY_FACTORS = {-1: 1 / 16, 0: 1.0, 1: 16.0}
"""Of what a run of each priority is worth. A factor and not an order: worth falls with age, so what
nobody comes back to leaves in the end, whatever somebody said of it."""
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


class ByReturn:
    """Order of departure in one tier: see policy/eviction.py. Some 20 bytes a slot.

    Args:
        ttl_s: of slots of which nothing is known (add_oldest); None: they do not expire.
    """

    def __init__(
        self, num_slots: int, estimator: ReturnEstimator, ttl_s: float | None = None
    ) -> None:
        self._estimator = estimator
        self._num_slots = num_slots
        self._ttl_s = ttl_s
        self.clear()

    def __len__(self) -> int:
        return self._length

    def __contains__(self, slot: int) -> bool:
        return self._group_of[slot] >= 0

    def clear(self) -> None:
        self._length = 0
        self._opened = 0
        self._group_of = array("q", [-1]) * self._num_slots
        self._groups: dict[int, _Group] = {}
        # By kind and priority; each oldest first.
        self._kinds: dict[tuple[int, int], OrderedDict[Run, _Group]] = {}
        self._leases: list[tuple[float, int]] = []  # a heap: when to look at which group
        self._expired: OrderedDict[int, _Group] = OrderedDict()
        self._poorest: _Group | None = None
        self._victims_left = 0

    def run_of(self, slot: int) -> Run | None:
        group = self._groups.get(self._group_of[slot])
        return group.run if group is not None else None

    def add(self, slot: int, run: Run) -> None:
        assert self._group_of[slot] < 0
        self._enter(self._group(run), slot)

    def use(self, slots: Sequence[int], run: Run) -> None:
        if not slots:
            return
        group = self._group(run)
        for slot in slots:
            before = self._group_of[slot]
            assert before >= 0
            if before != group.number:
                self.remove(slot)
                self._enter(group, slot)

    def add_oldest(self, slots: npt.NDArray[np.int32], now: float) -> None:
        """Add many of which nothing is known; of them the first goes first.

        They are as old as can be, until somebody uses them.
        """
        group_of = np.frombuffer(self._group_of, np.int64)
        assert np.all(group_of[slots] < 0)
        oldest = unknown_run(now - EDGES_S[-1])
        lease = lease_for(self._ttl_s, now)
        for start in range(0, len(slots), OLDEST_SLOTS):
            part = slots[start : start + OLDEST_SLOTS]
            group = self._group(replace(oldest, lease=lease))
            group.slots = array("i", part[::-1].astype(np.int32).tobytes())
            group.num_left = len(part)
            group_of[part] = group.number
        self._length += len(slots)

    def remove(self, slot: int) -> None:
        group = self._groups[self._group_of[slot]]
        self._group_of[slot] = -1
        self._length -= 1
        group.num_left -= 1
        self._tidy(group)

    def victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """The slot to free, or None if none is found that can go. Nothing is changed.

        Cost: two groups a kind for the first slot of a group, O(1) for those after it.
        """
        slot = self._expired_victim(now, can_go) if self._leases or self._expired else None
        if slot is not None:
            return slot
        if self._poorest is not None and self._victims_left:
            self._victims_left -= 1
            slot = self._last(self._poorest, can_go)
            if slot is not None:
                return slot
        self._victims_left = VICTIMS_MAX
        found, least = None, (0.0, False)
        for groups in self._kinds.values():
            for ends in (groups.values(), reversed(groups.values())):
                for _, group in zip(range(GROUPS_MAX), ends, strict=False):
                    slot = self._last(group, can_go)
                    if slot is None:
                        continue
                    # Of one request, what others share is before what is its own, and stays.
                    worth = self._worth(group.run, now), group.run.is_shared
                    if found is None or worth < least:
                        found, least, self._poorest = slot, worth, group
                    break
        return found

    def admits(self, run: Run, slot: int, now: float) -> bool:
        """Not if it is less likely to return soon than what would have to go.

        So prompts that come once do not push out conversations.
        """
        held = self.run_of(slot)
        return held is None or self._worth(run, now) >= self._worth(held, now)

    def _worth(self, run: Run, now: float) -> float:
        factor = PRIORITY_FACTORS[run.priority]
        return factor * self._estimator.worth(run.kind, now - run.since)

    def _expired_victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
        """A slot that nobody will find any more. Those that cannot go now do not hide others."""
        for _ in range(LEASES_MAX):
            if not self._leases or self._leases[0][0] > now:
                break
            group = self._groups.get(heappop(self._leases)[1])
            if group is not None and group.run.has_expired(now):
                self._expired[group.number] = group
            elif group is not None:
                self._watch(group, group.run.lease)
        for group in list(islice(self._expired.values(), GROUPS_MAX)):
            if not group.run.has_expired(now):  # used again meanwhile
                del self._expired[group.number]
                self._watch(group, group.run.lease)
                continue
            slot = self._last(group, can_go)
            if slot is not None:
                return slot
            self._expired.move_to_end(group.number)
        return None

    def _watch(self, group: _Group, lease: Lease | None) -> None:
        """Look at the group when its lease may have expired. Cost: O(log groups), amortized."""
        if lease is None:
            return
        heappush(self._leases, (lease.expires, group.number))
        if len(self._leases) > 2 * len(self._groups) + STALE_MAX:
            live = {number for _, number in self._leases} & self._groups.keys()
            leases = ((number, self._groups[number].run.lease) for number in live)
            self._leases = [(lease.expires, number) for number, lease in leases if lease]
            heapify(self._leases)

    def _last(self, group: _Group, can_go: Callable[[int], bool]) -> int | None:
        slots, group_of, number = group.slots, self._group_of, group.number
        while slots and group_of[slots[-1]] != number:
            slots.pop()
        if not slots or can_go(slots[-1]):
            return slots[-1] if slots else None
        ours = (slot for slot in reversed(slots) if group_of[slot] == number)
        return next((slot for slot in islice(ours, CHUNKS_MAX) if can_go(slot)), None)

    def _group(self, run: Run) -> _Group:
        key = run.kind, run.priority
        kinds = self._kinds.get(key)
        group = kinds.get(run) if kinds is not None else None
        if group is None:
            kinds = self._kinds.setdefault(key, OrderedDict())
            self._opened += 1
            group = kinds[run] = self._groups[self._opened] = _Group(self._opened, run)
            self._poorest = None
            self._watch(group, run.lease)
        return group

    def _enter(self, group: _Group, slot: int) -> None:
        self._group_of[slot] = group.number
        group.slots.append(slot)
        group.num_left += 1
        self._length += 1

    def _tidy(self, group: _Group) -> None:
        """Some slot has left. Cost: O(1), amortized."""
        if not group.num_left:
            del self._groups[group.number]
            self._expired.pop(group.number, None)
            kind = group.run.kind, group.run.priority
            of_kind = self._kinds[kind]
            del of_kind[group.run]
            if not of_kind:
                del self._kinds[kind]
            if group is self._poorest:
                self._poorest = None
        elif len(group.slots) > 2 * group.num_left + STALE_MAX:
            left = dict.fromkeys(s for s in group.slots if self._group_of[s] == group.number)
            group.slots = array("i", left)


@dataclass(frozen=True, slots=True)
class Visit:
    """The runs of one request: [0, num_shared) chunks, and those after them."""

    num_shared: int
    shared: Run
    own: Run

    def run(self, number: int) -> Run:
        """Of chunk `number` of the request."""
        return self.shared if number < self.num_shared else self.own


def visit_of(
    estimator: ReturnEstimator,
    last_runs: Sequence[Run | None],
    marks: Sequence[int],
    num_tokens: int,
    now: float,
    terms: Terms = NO_TERMS,
    ttl_s: float | None = None,
) -> Visit:
    """What a request that comes now uses, and by which runs it is remembered.

    A chunk is shared if another run than the one that this request continues was the last to use
    it, and then for as long as it is stored.

    Args:
        last_runs: of the request's leading chunks that are stored, the run that used each last.
        marks: of its whole chunks.
        num_tokens: of its prompt.
        terms: what it asks for its own chunks. For those that others share it can ask for more
            than they have, and not for less.
        ttl_s: of all chunks; None: they do not expire. The terms may have a shorter one.
    """
    before = estimator.arrive(marks, now)
    num_shared = _num_shared(last_runs, before)
    known = max(before.depth if before is not None else 0, len(last_runs))
    turn = min(before.turn + 1, TURNS_MAX) if before is not None else 1
    gap_s = now - before.since if before is not None else None
    is_fresh = 2 * (len(marks) - known) > len(marks)

    def run(start: int, stop: int, *, is_shared: bool) -> Run:
        kind = kind_of(turn, gap_s, num_tokens, is_fresh=is_fresh, is_shared=is_shared)
        number = 0
        if stop > start:
            follows = 0 if is_shared else turn
            number = estimator.open(marks[stop - 1], kind, follows, stop - start, now)
        if is_shared:
            return Run(number, kind, now, True, max(0, terms.priority), lease_for(ttl_s, now))
        ttls = [ttl for ttl in (ttl_s, terms.ttl_s) if ttl is not None]
        lease = lease_for(min(ttls), now) if ttls else None
        return Run(number, kind, now, False, terms.priority, lease)

    shared = run(0, min(num_shared, len(marks)), is_shared=True)
    return Visit(num_shared, shared, run(num_shared, len(marks), is_shared=False))


def _num_shared(last_runs: Sequence[Run | None], before: Before | None) -> int:
    """Of the leading chunks, how many other conversations use too."""
    own = before.number if before is not None else 0
    for number, run in enumerate(last_runs):
        if run is None or not (run.is_shared or run.number != own):
            return number
    return len(last_runs)
