# SPDX-License-Identifier: Apache-2.0
"""Runs: the part of a conversation that one request used, and what that request asked for it:
terms, leases and pins.

A visit is which stored chunks a request uses, and by which two runs it is remembered. Pure: time is
given. A chunk is of the run that used it last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from attnstore_vllm.policy.eviction.return_estimator import (
    TURNS_MAX,
    Before,
    ReturnEstimator,
    answered,
    kind_of,
)

ENDED_PRIORITY = -3
"""Priority of KV that nobody comes back to, as its last request has said."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a request asks for its KV to be kept."""

    priority: int = 0
    """-1: leaves tiers before others, 1: after them. ENDED_PRIORITY: first of all."""
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


@dataclass(slots=True, eq=False)
class Run:
    """The chunks that one request used of one conversation. Compared by identity."""

    number: int
    kind: int
    """Its kind for the estimator. Changed by answer() alone; orders of departure are to be told."""
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
    before_tokens: int = 0
    """The length of the prompt before it, which is another conversation's if only their whole
    chunks are the same."""

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
            mark = marks[stop - 1]
            number = estimator.open(mark, kind, follows, stop - start, now, num_tokens)
        if is_shared:
            return Run(number, kind, now, True, max(0, terms.priority), lease_for(ttl_s, now))
        ttls = [ttl for ttl in (ttl_s, terms.ttl_s) if ttl is not None]
        lease = lease_for(min(ttls), now) if ttls else None
        return Run(number, kind, now, False, terms.priority, lease)

    shared = run(0, min(num_shared, len(marks)), is_shared=True)
    own = run(num_shared, len(marks), is_shared=False)
    return Visit(num_shared, shared, own, before.num_tokens if before is not None else 0)


def answer(estimator: ReturnEstimator, run: Run, num_tokens: int) -> None:
    """The request was answered with so many tokens, which tells something of whether it is gone on
    with. The caller tells the orders of departure. Nothing changes for what others share."""
    if not run.is_shared:
        run.kind = answered(run.kind, num_tokens)
        estimator.change(run.number, run.kind)


def _num_shared(last_runs: Sequence[Run | None], before: Before | None) -> int:
    """How many of the leading chunks other conversations use too."""
    own = before.number if before is not None else 0
    for number, run in enumerate(last_runs):
        if run is None or not (run.is_shared or run.number != own):
            return number
    return len(last_runs)


ENDED_MAX = 64
"""Pins that one look ends."""
STALE_MAX = 16
"""The heap forgets what is not pinned any more when it is more than this and what is."""


@dataclass(frozen=True, slots=True)
class Pin:
    tenant: bytes
    until: float


class Pins(dict[int, Pin]):
    """The pins of one tier, by slot. Changed by its own methods alone. Cost of each call:
    O(log pins), amortized.

    All pins together, and those of each tenant, have a share of the tier's slots. A pin beyond it
    is refused, so no tenant can take another's room, or more of it than the operator has allowed.
    """

    def __init__(self, share: float = 0.0, tenant_share: float = 0.0) -> None:
        super().__init__()
        self._share = share
        self._tenant_share = tenant_share
        self._per_tenant: Counter[bytes] = Counter()
        self._ends: list[tuple[float, int]] = []  # a heap; may name what has gone or lasts longer

    def add(self, slot: int, pin: Pin, num_slots: int) -> bool:
        """Pin the slot, or let its pin last longer. False: it would be beyond the share.

        Args:
            num_slots: that the tier has now.
        """
        before = self.get(slot)
        if before is not None:
            if before.until >= pin.until:
                return True
            pin = Pin(before.tenant, pin.until)
        else:
            if len(self) >= int(self._share * num_slots):
                return False
            if self._per_tenant[pin.tenant] >= int(self._tenant_share * num_slots):
                return False
            self._per_tenant[pin.tenant] += 1
        self[slot] = pin
        heappush(self._ends, (pin.until, slot))
        if len(self._ends) > 2 * len(self) + STALE_MAX:
            self._ends = [(pin.until, slot) for slot, pin in self.items()]
            heapify(self._ends)
        return True

    def remove(self, slot: int) -> None:
        """The slot is pinned no longer, if it was."""
        pin = self.pop(slot, None)
        if pin is not None:
            self._per_tenant[pin.tenant] -= 1
            if not self._per_tenant[pin.tenant]:
                del self._per_tenant[pin.tenant]

    def take_ended(self, now: float) -> list[int]:
        """Slots whose pin has ended, ENDED_MAX at most; they are pinned no longer."""
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= now and len(ended) < ENDED_MAX:
            _, slot = heappop(self._ends)
            pin = self.get(slot)
            if pin is not None and pin.until <= now:
                self.remove(slot)
                ended.append(slot)
        return ended
