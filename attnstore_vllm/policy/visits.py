# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks a request uses, and by which runs it is remembered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnstore_vllm.policy.eviction.return_estimator import (
    TURNS_MAX,
    Before,
    ReturnEstimator,
    kind_of,
)
from attnstore_vllm.policy.runs import NO_TERMS, Run, Terms, lease_for


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
