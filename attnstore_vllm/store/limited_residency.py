# SPDX-License-Identifier: Apache-2.0
"""Quotas of DRAM for tenants. Where the settings have none, Residency is used as it is.

A tenant that is at its quota makes room for itself: its own least worthy chunk goes, and a save for
which none can go is not made. What is stored already may be read though it goes beyond: a request
that waits would else wait in vain. What is beyond goes before all others when DRAM is full. What is
pinned counts, and does not go; how much that may be, the shares of pins say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attnstore_vllm.config.tenants import Quota
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.eviction.rules import may_be_lost
from attnstore_vllm.policy.lookahead import QueuePlace
from attnstore_vllm.policy.quotas import Quotas
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.context import Pool
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.types import DRAM, Event


class LimitedResidency(Residency):
    """A residency in which tenants have quotas.

    Args:
        dram_quotas: by tenant, the slots of DRAM that it may hold.
        names: of these tenants, as the operator calls them.
    Others: see Residency.
    """

    def __init__(
        self,
        dram_slots: int,
        nvme_slots: int,
        policy: Callable[[int], Departures],
        *,
        dram_quotas: Mapping[bytes, int],
        names: Mapping[bytes, str],
        **others: Any,
    ) -> None:
        super().__init__(dram_slots, nvme_slots, policy, **others)
        self.names = names
        self.quotas = Quotas(dram_quotas, lambda: policy(dram_slots))
        for order in self.quotas.orders():
            order.depth_of = self.dram.depth_of
        self._orders += self.quotas.orders()

    def _move(self, chunks: Sequence[Chunk], run: Run) -> None:
        super()._move(chunks, run)
        self.quotas.use([chunk.dram.slot for chunk in chunks], run)

    def begin_save(self, name: ChunkName, run: Run | None = None, **how: Any) -> Chunk | None:
        if self.quotas.is_full(name.tenant) and not self._has_own_room_to_save(name, run, how):
            if not (how.get("low_value") or how.get("waits")):
                self.counts[Event.DROPPED] += 1
            return None
        chunk = super().begin_save(name, run, **how)
        if chunk is not None:
            self.quotas.add(name.tenant, chunk.dram.slot, chunk.run)
        return chunk

    def _has_own_room_to_save(
        self, name: ChunkName, run: Run | None, how: Mapping[str, Any]
    ) -> bool:
        """Whether the save may go on: room was made, or what is stored already is only used."""
        known = self._known(name)
        if known is not None:
            may_copy = how.get("again") or known.behind.keys() <= self._asked
            if known.dram.state is State.ABSENT and may_copy:
                self._make_own_room(name.tenant, -math.inf)
            return True
        if not how.get("is_alone") and self.index.extends(name):
            return True
        if how.get("low_value"):
            return False
        since = math.inf if run is None else run.since
        return self._make_own_room(name.tenant, -math.inf if how.get("yields") else since)

    def begin_fetch(self, chunk: Chunk, tier: TierBehind, whose: QueuePlace | None = None) -> bool:
        tenant = chunk.name.tenant
        if self.quotas.is_full(tenant):
            self._make_own_room(tenant, -math.inf)
        has_begun = super().begin_fetch(chunk, tier, whose)
        if has_begun:
            self.quotas.add(tenant, chunk.dram.slot, chunk.run)
        return has_begun

    def _make_room_in_dram(
        self,
        whose: QueuePlace | None = None,
        run: Run | None = None,
        since: float = math.inf,
        count: int = 1,
    ) -> bool:
        if not self.dram.free:
            for tenant in [*self.quotas.over]:
                if self._make_own_room(tenant, since if whose is None else -math.inf):
                    break
        return super()._make_room_in_dram(whose, run, since, count)

    def _make_own_room(self, tenant: bytes, since: float) -> bool:
        """One of the tenant's chunks leaves DRAM, if one can.

        Args:
            since: when the request came that a save is for. What only DRAM has may go for one that
                came later; see may_be_lost().
        """
        self.pinning.end(self.now)
        self.dram.place_left()
        owned, growing = self.dram.owned, self.dram.growing

        def is_clean(slot: int) -> bool:
            return self.dram.may_go(slot) and owned[slot].is_behind

        def can_be_lost(slot: int) -> bool:
            return self.dram.may_go(slot) and may_be_lost(owned[slot].run, since, growing)

        slot = self.quotas.victim(tenant, self.now, is_clean)
        if slot is None and since > -math.inf:
            slot = self.quotas.victim(tenant, self.now, can_be_lost)
        if slot is None:
            return False
        self.counts[Event.EVICTED_DRAM] += 1
        self.leave_dram(owned[slot])
        return True

    def leave_dram(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            self.quotas.remove(chunk.dram.slot)
        super().leave_dram(*chunks)

    def check_integrity(self) -> None:
        """All that Residency asserts, and a recount, but of the copies that audits compare."""
        super().check_integrity()
        self.quotas.check_integrity(
            (slot, chunk.name.tenant)
            for slot, chunk in self.dram.owned.items()
            if not chunk.dropped or slot in self.quotas
        )


def residency_with(quotas: Sequence[Quota], pool: Pool) -> Callable[..., Residency]:
    """Residency, or one with quotas. Raises ConfigError, in which no salt is."""
    if not quotas:
        return Residency
    names: dict[bytes, str] = {}
    slots: dict[bytes, int] = {}
    for quota in quotas:
        tenant = tenant_hash(quota.salt())
        if tenant in names:
            raise ConfigError(
                f"quotas.{names[tenant]} and quotas.{quota.name} are of the same salt, which can "
                "have one quota; take one of them out"
            )
        names[tenant] = quota.name
        slots[tenant] = quota.dram_slots(pool.num_slots, pool.slot_bytes)
    return partial(LimitedResidency, dram_quotas=slots, names=names)


def tenant_gauges(residency: Residency, slot_bytes: int) -> dict[tuple[str, str], float]:
    """Bytes that each tenant with a quota holds and may hold. Without quotas there is none."""
    if not isinstance(residency, LimitedResidency):
        return {}
    quotas, gauges = residency.quotas, dict[tuple[str, str], float]()
    for tenant, name in residency.names.items():
        label = f"{name}|{DRAM}"
        gauges["tenant_held_bytes", label] = float(quotas.held(tenant) * slot_bytes)
        gauges["tenant_quota_bytes", label] = float(quotas.most(tenant) * slot_bytes)
    return gauges
