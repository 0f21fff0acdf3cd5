# SPDX-License-Identifier: Apache-2.0
"""Runs: the part of a conversation that one request used, and what that request asked for it.

A visit is which stored chunks a request uses, and by which two runs it is remembered. Pure: time is
given. A chunk is of the run that used it last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnstore_vllm.policy.eviction.return_estimator import (
    TURNS_MAX,
    Before,
    ReturnEstimator,
    kind_of,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a request asks for its KV to be kept."""

    priority: int = 0
    """-1: leaves tiers before others, 1: after them."""
    ttl_s: float | None = None
    """After so long without use it is not found any more. None: as long as there is room."""
    pin_s: float | None = None
    """So long its prompt's KV is not evicted, if its tenant's share allows."""


NO_TERMS = Terms()


@dataclass(slots=True, eq=False)
class Lease:
    """Until when KV that nobody uses is kept."""

    ttl_s: float
    expires: float

    def use(self, now: float) -> None:
        self.expires = max(self.expires, now + self.ttl_s)


def lease_for(ttl_s: float | None, now: float) -> Lease | None:
    return None if ttl_s is None else Lease(ttl_s, now + ttl_s)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The chunks that one request used of one conversation. Compared by identity."""

    number: int
    kind: int
    since: float
    is_shared: bool
    priority: int = 0
    lease: Lease | None = None

    def use(self, now: float) -> None:
        if self.lease is not None:
            self.lease.use(now)

    def has_expired(self, now: float) -> bool:
        return self.lease is not None and self.lease.expires <= now

    def renewed(self, now: float) -> Run:
        """The same, of chunks that count as used now; the lease is their own from here on."""
        lease = self.lease
        if lease is not None:
            lease = Lease(lease.ttl_s, lease.expires)
        return replace(self, since=now, lease=lease)


def unknown_run(now: float) -> Run:
    """The run of chunks of which nothing is known but that somebody used or wrote them now."""
    return Run(0, kind_of(1, None, 0, is_fresh=True, is_shared=False), now, False)


NO_RUN = unknown_run(0.0)


@dataclass(frozen=True, slots=True)
class Visit:
    """The runs of one request: [0, num_shared) chunks, and those after them."""

    num_shared: int
    shared: Run
    own: Run

    def run(self, number: int) -> Run:
        """The run of chunk `number` of the request."""
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
    """The chunks that a request that comes now uses, and by which runs it is remembered.

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
    """How many of the leading chunks other conversations use too."""
    own = before.number if before is not None else 0
    for number, run in enumerate(last_runs):
        if run is None or not (run.is_shared or run.number != own):
            return number
    return len(last_runs)
