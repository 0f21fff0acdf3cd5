# SPDX-License-Identifier: Apache-2.0
"""Runs: the part of a conversation that one request used, and what that request asked for it.

Pure: time is given. A chunk is of the run that used it last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnstore_vllm.policy.eviction.return_estimator import kind_of


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
