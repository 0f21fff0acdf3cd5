# SPDX-License-Identifier: Apache-2.0
"""Visits: which stored chunks a request uses, for how long it asks to keep them, and by which runs
they are remembered. A chunk is of the run that used it last. Pure: time is given.

It is long since it says for each way in which two requests can meet whose terms hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.ages import Array
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import (
    TURNS_MAX,
    Before,
    ReturnEstimator,
    answered,
    kind_of,
)
from attnstore_vllm.policy.told import NOTHING, Told, ToldReturns


class LastTurn(NamedTuple):
    """The last turn of a session that has a name."""

    number: int
    since: float
    """When its request came."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a request asks for its KV to be kept."""

    priority: Priority = Priority.NORMAL
    ttl_s: float | None = None
    """After so long without use it is not found any more. None: as long as there is room."""
    pin_s: float | None = None
    """So long its prompt's KV is not evicted, if its tenant's share allows."""
    session: frozenset[int] | None = None
    """The numbers of the last runs of its session, if that has a name, by which all that it has
    left can end later."""
    last_turn: LastTurn | None = None
    """That of its session, if that has a name and was heard of before."""
    told: Told | None = None
    """The client's words of when the next turn comes."""


NO_TERMS = Terms()


@dataclass(slots=True, eq=False)
class Lease:
    """Until when KV that is not used is kept."""

    ttl_s: float
    expires: float

    def use(self, now: float) -> None:
        self.expires = max(self.expires, now + self.ttl_s)


def lease_for(ttl_s: float | None, now: float) -> Lease | None:
    return None if ttl_s is None else Lease(ttl_s, now + ttl_s)


@dataclass(slots=True, eq=False)
class Lot:
    """All that one request has left, be its chunks of other runs meanwhile: they end together."""

    runs: WeakKeyDictionary[Run, None] = field(default_factory=WeakKeyDictionary)
    has_ended: bool = False


LOTS_MAX = 4
"""KV that more requests than these share ends with none of them."""
SHARED_RUNS_MAX = 4
"""A request's shared chunks are of so many runs at most, by how long they are kept."""
JOINT_MAX = 32
"""Twice the runs of others that a request remembers to have joined while it waits."""
LEFT_PARTS = 16
"""Chunks whose time ends in the same part of so many share a lease, so that there are few."""


def by_end(ends: Array, now: float) -> Iterator[tuple[npt.NDArray[np.intp], Lease | None]]:
    """Leases for chunks that an earlier process has left, and which of them each is for: the first
    to end first, and each in their order. No use renews one: who uses a chunk has a lease of his
    own.

    Args:
        ends: [n] when each ends; infinite: never. A lease may end earlier, by a sixteenth of what
            is left, and not later.
    """
    does_end = np.isfinite(ends)
    left = np.maximum(ends[does_end] - now, 1e-3)
    steps = np.exp2(np.floor(np.log2(left / LEFT_PARTS)))
    until = ends.copy()
    until[does_end] = np.minimum(ends[does_end], now + np.floor(left / steps) * steps)
    values, which = np.unique(until, return_inverse=True)
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(len(values) + 1))
    for end, start, stop in zip(values.tolist(), bounds, bounds[1:], strict=False):
        yield order[start:stop], None if end == math.inf else Lease(0.0, end)


def left_by(end: float) -> Run:
    """The run of a chunk that an earlier process has left, which ends then unless it is used."""
    return replace(NO_RUN, lease=None if end == math.inf else Lease(0.0, end))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """The chunks that one request used of one conversation. Compared by identity."""

    number: int
    kind: int
    """Its kind for the estimator. Changed by answer() alone; orders of departure
    are to be told."""
    since: float
    is_shared: bool
    priority: Priority = Priority.NORMAL
    lease: Lease | None = None
    before: Run | None = None
    """The shared run that its request used too, which has the chunks before these. It may have one
    before it in turn: SHARED_RUNS_MAX in all."""
    follows: frozenset[int] = frozenset()
    """The numbers of the runs that its request goes on from."""
    prompt_tokens: float = math.inf
    """The length of its request's prompt, if it is a request's own."""
    ended_at: float = math.inf
    """When its request ended."""
    is_known: bool = True
    """It is a request's. Else of what others or an earlier process have left: of whom is not known.
    """
    lots: tuple[Lot, ...] = ()
    """It ends once all of these have. None: nothing was made of it yet."""
    told: Told | None = None
    """The client's words of it. None of what others share."""
    context: int = NOTHING
    """The number of that, as the estimator has it. Changed by answer() alone."""
    used_at: float = field(init=False)
    """When a request used it, or saved chunks for it, last."""

    def __post_init__(self) -> None:
        self.used_at = self.since
        for lot in self.lots:
            lot.runs[self] = None

    def as_lots(self) -> tuple[Lot, ...]:
        """Its lots, from now on. Of what is not known whose it is nothing ends."""
        if not self.lots and self.is_known:
            lot = Lot(has_ended=self.priority is Priority.ENDED)
            lot.runs[self] = None
            self.lots = (lot,)
        return self.lots

    def copy(self, **changes: Any) -> Run:
        """Another run of chunks that stay of the same request, and end with what it has left."""
        return replace(self, lots=self.as_lots(), **changes)

    def touch(self, now: float) -> None:
        """A request uses it, or saves for it. What is before it is newer, and leaves after it."""
        self.used_at = max(self.used_at, now)
        before = self.before
        if before is not None:
            before.touch(math.nextafter(now, math.inf))

    def use(self, now: float) -> None:
        self.touch(now)
        if self.lease is not None:
            self.lease.use(now)

    def has_expired(self, now: float) -> bool:
        return self.lease is not None and self.lease.expires <= now

    def renewed(self, now: float) -> Run:
        """The same, of chunks that count as used now; the lease is their own from here on."""
        lease = self.lease
        if lease is not None:
            lease = Lease(lease.ttl_s, lease.expires)
        return self.copy(since=now, lease=lease)


def unknown_run(now: float, ttl_s: float | None = None) -> Run:
    """The run of chunks of which nothing is known but that they were used or written now.

    Args:
        ttl_s: of the whole server.
    """
    kind = kind_of(1, None, 0, is_fresh=True, is_shared=False)
    return Run(0, kind, now, False, lease=lease_for(ttl_s, now), is_known=False)


NO_RUN = unknown_run(0.0)


def lots_of(runs: Iterable[Run], *more: Lot) -> tuple[Lot, ...]:
    """Lots of a run of what all of these share: it ends once all have. None, and so it ends with
    none, if they are too many, or if it is not known whose one of them is."""
    each = dict.fromkeys(runs)
    lots = dict.fromkeys([*(lot for run in each for lot in run.as_lots()), *more])
    return tuple(lots) if len(lots) <= LOTS_MAX and all(run.is_known for run in each) else ()


@dataclass(frozen=True, slots=True)
class Visit:
    """The runs of one request: [0, num_shared) chunks, and those after them."""

    num_shared: int
    shared: Run
    """The shared chunks' run: that of the deepest of them where there are `earlier` ones."""
    own: Run
    before_tokens: int = 0
    """The length of the prompt before it, which is another conversation's if only their whole
    chunks are the same."""
    earlier: tuple[tuple[int, Run], ...] = ()
    """Runs of the leading shared chunks that are kept longer, since others use them too, and up to
    which chunk each is. The first ones first."""
    is_branch: bool = False
    """It parts from another conversation within a chunk: others may part there as well."""
    joint: dict[Run, Run] = field(default_factory=dict)
    """Runs of what others have left or used since it came, and of which runs that is from now on:
    themselves, once that is so."""

    def until(self, lease: Lease | None) -> Visit:
        """The same, of a request whose own chunks get this lease from now on."""
        return replace(self, own=self.own.copy(lease=lease))

    def run(self, number: int, last: Run | None = None) -> Run:
        """The run of chunk `number` of the request.

        Args:
            last: that used the stored one last, if it is stored.
        """
        if last is self.own:
            return last
        if last is not None and last in self.joint:
            return self.joint[last]
        if number >= self.num_shared:
            return self.own
        for stop, run in self.earlier:
            if number < stop:
                return run
        return self.shared

    def joined(self, number: int, last: Run, now: float) -> Run:
        """run() of a stored chunk that the visit was not made for: others have left or used it
        since, or it is a part of the request's chunk. It is kept as one of both said who asked for
        more."""
        used = self.run(number, last)
        if used is last or last in self.joint or not last.is_known:
            return used
        if any(last is run for run in self.runs):
            return last
        if last.number == self.own.number and last.number and not last.is_shared:
            return self.own  # a prefetch or the end of a pin has renewed it
        joint = used_by_both(self.own, last, now)
        if joint is self.own:
            if goes_on_from(joint, last):
                return joint
            priority = max(Priority.NORMAL, joint.priority)
            lots = lots_of((last, joint))
            joint = replace(joint, is_shared=True, priority=priority, lots=lots)
        if len(self.joint) >= JOINT_MAX:
            self.joint.clear()
        self.joint[last] = self.joint[joint] = joint
        return joint

    def runs_of(self, first: int, stop: int) -> list[Run]:
        """run() of each of these chunks."""
        border = min(max(first, self.num_shared), stop)
        return [*map(self.run, range(first, border)), *[self.own] * (stop - border)]

    @property
    def runs(self) -> list[Run]:
        """All, the first chunks' first."""
        joint = dict.fromkeys(self.joint.values())
        return [*(run for _, run in self.earlier), self.shared, *joint, self.own]


class Alike(NamedTuple):
    """How far a prompt seems to go on from what is stored."""

    num_tokens: int
    """So many of its tokens may be those of the prompt before it."""
    parts_within: bool
    """The last of its leading chunks that are stored goes on otherwise."""
    num_chunks: int
    """So many of its leading chunks are stored, the last one perhaps in part."""
    parted: Run | None = None
    """The run of the chunk within which it goes on otherwise, if it does."""
    gone_on: Run | None = None
    """The run of the last chunk that one request alone has left, if all of the prompt of that one
    is found: its next turn, though the end of that prompt is not followed (see ReturnEstimator)."""


def visit_of(
    estimator: ReturnEstimator,
    last_runs: Sequence[Run | None],
    marks: Sequence[int],
    num_tokens: int,
    now: float,
    terms: Terms = NO_TERMS,
    ttl_s: float | None = None,
    *,
    num_known: int = 0,
    alike: Alike | None = None,
) -> Visit:
    """The chunks that a request that comes now uses, and by which runs it is remembered.

    A chunk is shared if another run than the one that this request continues was the last to use
    it, and then for as long as it is stored.

    Args:
        last_runs: of the request's leading chunks that are stored, the run that used each last. Of
            what is stored it has all: no beginning alone.
        marks: of its whole chunks.
        num_tokens: of its prompt.
        terms: what it asks for its own chunks. For those that others share it can ask for more
            than they have, and not for less: they have the longest ttl of all who used them.
        ttl_s: of all chunks; None: they do not expire. The terms may have a shorter one.
        num_known: chunks of its prompt that need not be computed, with those that are moved.
        alike: how far the prompt seems to go on from what is stored; None: it does.
    """
    before = estimator.arrive(marks, now)
    own_numbers = _own_numbers(before, alike, terms, last_runs)
    num_shared = _num_shared(last_runs, own_numbers)
    known = max(before.depth if before is not None else 0, len(last_runs), num_known)
    turn, gap_s = _rhythm(before, terms.last_turn, now)
    is_fresh = 2 * (len(marks) - known) > len(marks)

    ttls = [ttl for ttl in (ttl_s, terms.ttl_s) if ttl is not None]
    own_lease = lease_for(min(ttls), now) if ttls else None
    lot = Lot(has_ended=terms.priority is Priority.ENDED)

    def run(start: int, stop: int, lease: Lease | None, *, is_shared: bool) -> Run:
        stop = min(stop, len(marks))
        kind = kind_of(turn, gap_s, num_tokens, is_fresh=is_fresh, is_shared=is_shared)
        number = 0 if is_shared or stop > start else estimator.unfollowed()
        told = None if is_shared else terms.told
        if stop > start:
            follows = 0 if is_shared else turn
            mark = marks[stop - 1]
            number = estimator.open(mark, kind, follows, stop - start, now, num_tokens)
        priority = max(Priority.NORMAL, terms.priority) if is_shared else terms.priority
        lots: tuple[Lot, ...] = () if is_shared else (lot,)
        if is_shared and stop > start:
            lasts = [last or NO_RUN for last in last_runs[start:stop]]
            lots = lots_of(lasts, lot)
            priority = max(priority, *(last.priority for last in lasts))
        return Run(number, kind, now, is_shared, priority, lease, lots=lots, told=told)

    parts, start = list[tuple[int, Run]](), 0
    num_told = len(marks) if terms.session is not None else 0
    for stop, lease in _shared_leases(last_runs[:num_shared], own_lease, ttl_s, now, num_told):
        parts.append((stop, run(start, stop, lease, is_shared=True)))
        if start:
            parts[-1][1].before = parts[-2][1]
        start = stop
    *earlier, (_, shared) = parts
    own = run(num_shared, len(marks), own_lease, is_shared=False)
    own.before, own.follows, own.prompt_tokens = shared, own_numbers - {0}, num_tokens
    before_tokens = before.num_tokens if before is not None else 0
    parted = alike.parted if alike is not None else None
    is_branch = parted is not None and parted.number not in own_numbers
    return Visit(num_shared, shared, own, before_tokens, tuple(earlier), is_branch)


def _shared_leases(
    last_runs: Sequence[Run | None],
    asked: Lease | None,
    ttl_s: float | None,
    now: float,
    num_told: int,
) -> list[tuple[int, Lease | None]]:
    """Leases of shared chunks, and up to which chunk each is for: the longest of all who used a
    chunk. Who uses a chunk uses those before it, so none is kept longer than those.

    Args:
        last_runs: of the shared chunks, the run that used each last, with its lease.
        asked: the lease that this request's own chunks get.
        ttl_s: of all chunks.
        num_told: so many leading chunks are told apart by who has left them, too.
    """
    most = math.inf if ttl_s is None else ttl_s
    longest, end, stop = 0.0, 0.0, len(last_runs)
    found: list[tuple[int, Lease | None]] = []
    for run, of_run in reversed([(run, len([*chunks])) for run, chunks in groupby(last_runs)]):
        lease = run.lease if run is not None else None
        if lease is None or asked is None:
            kept_s, until = most, now + most
        else:  # of what an earlier process has left, its end alone is known
            kept_s = min(most, max(lease.ttl_s, asked.ttl_s))
            until = max(now + kept_s, lease.expires)
        if not found or kept_s > longest or until > end:
            longest, end = max(longest, kept_s), max(end, until)
            found.append((stop, None if longest == math.inf else Lease(longest, end)))
        stop -= of_run
    first = found[::-1][:SHARED_RUNS_MAX]
    if not first:
        return [(0, lease_for(ttl_s, now))]
    return _cut_by_lots([*first[:-1], (len(last_runs), first[-1][1])], last_runs[:num_told])


def _cut_by_lots(
    leases: list[tuple[int, Lease | None]], last_runs: Sequence[Run | None]
) -> list[tuple[int, Lease | None]]:
    """The same, cut also where other requests have left the chunks, while SHARED_RUNS_MAX allows,
    the first chunks first. So what a session shares with its own requests ends with it, though
    strangers share the system prompt before it.

    Args:
        last_runs: of the leading shared chunks, the run that used each last.
    """
    stops, room = {stop for stop, _ in leases}, SHARED_RUNS_MAX - len(leases)
    cuts, start = list[int](), 0
    for _, chunks in groupby(last_runs, lambda run: run.as_lots() if run is not None else ()):
        if start and start not in stops and len(cuts) < room:
            cuts.append(start)
        start += len([*chunks])
    ends = iter(leases)
    stop, lease = next(ends)
    found = list[tuple[int, Lease | None]]()
    for cut in cuts:
        while stop < cut:
            found.append((stop, lease))
            stop, lease = next(ends)
        found.append((cut, lease and replace(lease)))
    return [*found, (stop, lease), *ends]


def _rhythm(
    before: Before | None, last_turn: LastTurn | None, now: float
) -> tuple[int, float | None]:
    """Which turn of its conversation a request is, TURNS_MAX at most, and how long it was away. A
    session's name says it where an edited prompt does not go on from the one before it."""
    if last_turn is not None and (before is None or not before.turn):
        return min(last_turn.number + 1, TURNS_MAX), now - last_turn.since
    if before is None:
        return 1, None
    return min(before.turn + 1, TURNS_MAX), now - before.since


def _own_numbers(
    before: Before | None, alike: Alike | None, terms: Terms, last_runs: Sequence[Run | None]
) -> frozenset[int]:
    """Numbers of the runs that a request of these terms goes on from; 0: of those without one."""
    numbers = {alike.gone_on.number} if alike is not None and alike.gone_on is not None else set()
    high = any(run is not None and run.priority > terms.priority for run in last_runs)
    asks_for_less = terms.ttl_s is not None or terms.priority < Priority.NORMAL or high
    if terms.session is not None:  # what is its own ends with it: that of its own name alone
        asks_for_less |= before is None or before.number not in terms.session
    if not asks_for_less or alike is None or _goes_on(before, alike):
        numbers.add(before.number if before is not None else 0)
    return frozenset(numbers)


def _goes_on(before: Before | None, alike: Alike) -> bool:
    """Whether a prompt seems to go on from the one before it. Short questions behind one system
    prompt have the same whole chunks: so something behind these must be the same, too."""
    if before is None:
        return not alike.parts_within
    return alike.num_chunks > before.depth and before.num_tokens <= alike.num_tokens


def _num_shared(last_runs: Sequence[Run | None], own: Container[int]) -> int:
    """How many of the leading chunks other conversations use too.

    Args:
        own: the runs of its own conversation; all others are of others.
    """
    for number, run in enumerate(last_runs):
        if run is None or (run.number in own and not run.is_shared):
            return number
    return len(last_runs)


def goes_on_from(run: Run, before: Run) -> bool:
    """Whether its request is the next turn of the conversation that has left the other one."""
    is_its = before.number in run.follows and not before.is_shared
    return is_its and before.ended_at <= run.since


def used_by_both(run: Run, before: Run, now: float) -> Run:
    """The run of a chunk that a request of `run` has computed, though one of `before` has left it:
    its look-up did not meet it. Both share it, and it is kept as the one of them said who asked
    for more. The next turn of a conversation takes it over, as it does what its look-up meets."""
    if goes_on_from(run, before):
        return run
    lease, other = run.lease, before.lease
    if lease is not None and other is not None:
        expires = max(now + lease.ttl_s, lease.expires)
        if other.ttl_s > lease.ttl_s or other.expires > expires:
            lease = Lease(max(lease.ttl_s, other.ttl_s), max(expires, other.expires))
    elif other is None:
        lease = None
    priority = max(run.priority, before.priority)
    if lease is run.lease and priority == run.priority and not before.is_shared:
        return run
    lots = lots_of((before, run))
    return replace(run, is_shared=True, priority=priority, lease=lease, lots=lots)


class JointRuns:
    """used_by_both() of one chunk after another: the chunks of two runs get one run, since of a run
    the deepest chunk leaves first. It remembers the last two."""

    def __init__(self) -> None:
        self._runs: tuple[Run, Run] | None = None
        self._joint: Run | None = None

    def of(self, run: Run, before: Run, now: float) -> Run:
        joint, last = used_by_both(run, before, now), self._joint
        if joint is run:
            return run
        if last is None or self._runs != (run, before):
            self._runs, self._joint = (run, before), joint
            return joint
        if joint.lease is not None and last.lease is not None:
            last.lease.expires = max(last.lease.expires, joint.lease.expires)
        return last


def moved_run(run: Run, visit: Visit, now: float) -> Run:
    """The run of chunks of this one that a request of this visit takes to other positions. They
    stay of their conversation, and are kept as long as the longest of both said. They end once
    both have: a session that has cut its prompt ends as a whole."""
    lease, own = run.lease, visit.own.lease
    if lease is not None and own is not None:
        own = Lease(max(lease.ttl_s, own.ttl_s), max(lease.expires, own.expires))
    priority = max(run.priority, visit.shared.priority)
    lease = None if lease is None else own
    lots = lots_of((run, visit.own))
    return replace(run, since=now, is_shared=True, priority=priority, lease=lease, lots=lots)


def answer(
    run: Run, num_tokens: int, estimator: ReturnEstimator, now: float, ending: Hashable = None
) -> None:
    """The request has ended, answered with so many tokens, which tells something of whether it is
    gone on with. The caller tells the orders of departure. Nothing changes for what others share.

    Args:
        ending: the last tokens of the answer, read where the client tells something too: a call of
            a tool ends with other tokens than what a person is to read. None: not known.
    """
    for one in (run, *(one for lot in run.lots for one in lot.runs)):
        if one.number == run.number:  # its copies are gone on from as it is
            one.ended_at = now
    if run.is_shared:
        return
    run.kind = answered(run.kind, num_tokens)
    if run.told is not None:
        run.context = _context(run.told, ending, estimator.told)
    estimator.change(run.number, run.kind, run.context)


def _context(told: Told, ending: Hashable, contexts: ToldReturns) -> int:
    """That of this ending, or else that of all which are not known."""
    others = contexts.context(told)
    context = contexts.context(told, ending) if ending is not None else NOTHING
    return context if context != NOTHING else others


def end(runs: Iterable[Run]) -> Iterator[Run]:
    """No request comes back to these, nor to what was made of them. The caller tells the orders of
    departure of each. Cost: that of the runs."""
    for run in runs:
        for lot in run.lots:
            lot.has_ended |= run.lots == (lot,)
        for one in dict.fromkeys((run, *(one for lot in run.lots for one in [*lot.runs]))):
            if one is run or all(lot.has_ended for lot in one.lots):
                one.priority = Priority.ENDED
                yield one


def end_some(runs: deque[Run], at_most: int, rank: Callable[[Run], None]) -> int:
    """end() of one after another, which leaves the line, until so many are ranked: the last one
    may be of more. Returns how many were."""
    ranked = 0
    while runs and ranked < at_most:
        for run in end((runs.popleft(),)):
            rank(run)
            ranked += 1
    return ranked
