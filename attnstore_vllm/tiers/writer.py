# SPDX-License-Identifier: Apache-2.0
"""DRAM -> a tier behind: dirty chunks are written back, within a budget, beside the reads.

dirty -> begin_store -> the tier writes -> clean
"""

from __future__ import annotations

from functools import partial

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.tier_io import TierIo
from attnstore_vllm.types import StoreFailure

DIRTY_PART = 8
"""Up to one slot in so many may be dirty while reads go before writes; with more, both go on."""
DIRTY_MIN = 4
_NOT_SENT = (StoreFailure.DOES_NOT_FIT, StoreFailure.IS_THERE, StoreFailure.OVER_QUOTA)


class Writer:
    """Writes to one tier. Methods marked *locked* are called with the store's lock held."""

    def __init__(self, context: Context, tier: TierIo, budget: Budget) -> None:
        self._context = context
        self._tier = tier
        self._budget = budget
        self.is_ending = False
        """The store ends: what is worth little is not written any more."""

    @property
    def has_work(self) -> bool:
        """Locked. Something waits to be written, or is being written."""
        return bool(len(self._tier.tier.waiting) or self._tier.num_storing or self._has_spare_work)

    @property
    def _has_spare_work(self) -> bool:
        """Locked. What is worth little may be written."""
        return not self.is_ending and self._context.residency.writes_if_room(self._tier.tier)

    def start(self, reading: bool) -> None:
        """Submit writes up to the depth. On the store's thread.

        Args:
            reading: reads go first, unless so much is dirty that saves would begin to be lost.
        """
        context, tier = self._context, self._tier
        while True:
            with context.progress:
                waiting = len(tier.tier.waiting)
                limit = max(DIRTY_MIN, context.pool.num_slots // DIRTY_PART)
                has_work = waiting or (not reading and self._has_spare_work)
                if not has_work or not tier.can_store or tier.stores_last:
                    return
                if not tier.health.writes.in_use:
                    return
                if reading and waiting <= limit:
                    return
                must_wait = tier.must_wait()
            if must_wait:
                tier.submit()
                return
            with context.progress:
                if not self._budget.take(context.steady(), tier.record_bytes):
                    return
                residency = context.residency
                residency.now = context.clock()
                chunk = residency.begin_store(tier.tier)
                if chunk is None:
                    self._budget.give_back(tier.record_bytes)
                    return
                payload = context.pool.slot(chunk.dram.slot)
                tier.begin_store(chunk, payload, partial(self._finish, chunk, residency.now))
            tier.submit()

    def _finish(self, chunk: Chunk, begun_at: float, outcome: bytes | StoreFailure) -> None:
        """Locked."""
        context, tier = self._context, self._tier
        if outcome in _NOT_SENT:
            self._budget.give_back(tier.record_bytes)  # nothing was sent there
        elif not isinstance(outcome, StoreFailure):
            now = context.clock()
            tier.write_cost.observe(now - max(begun_at, tier.store_ended_at))
            tier.store_ended_at = now
            context.moved_bytes[tier.flow_down] += tier.record_bytes
            if tier.sums_payloads:  # it is of this copy: another one may have other bytes
                chunk.dram.checksum = outcome
        context.residency.finish_store(tier.tier, chunk, outcome)
        context.progress.notify_all()
