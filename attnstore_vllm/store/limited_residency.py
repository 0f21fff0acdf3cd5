# SPDX-License-Identifier: Apache-2.0
"""Quotas of DRAM and NVMe for tenants. Where the settings have none, Residency is used as it is.

A tenant that is at its quota makes room for itself: its own least worthy chunk goes, and a save for
which none can go is not made. What is stored already may be read though it goes beyond: a request
that waits would else wait in vain. What is beyond goes before all others when DRAM is full. What is
pinned counts, and does not go; how much that may be, the shares of pins say.

What is said of NVMe alone is in tiers/nvme/limited_nvme.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attnstore_vllm.config.tenants import Quota, slots_of
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.eviction.rules import Gives, may_be_lost
from attnstore_vllm.policy.lookahead import QueuePlace
from attnstore_vllm.policy.quotas import Quotas
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.context import Pool
from attnstore_vllm.tiers.nvme.limited_nvme import LimitedNvme
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.types import DRAM, NVME, Event

SHRINK_MAX = 8
"""Chunks of a tenant over its quota of NVMe that go at most for one that is written."""


class LimitedResidency(Residency):
    """A residency in which tenants have quotas.

    Args:
        dram_quotas, nvme_quotas: by tenant, the slots that it may hold there.
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
        nvme_quotas: Mapping[bytes, int],
        names: Mapping[bytes, str],
        **others: Any,
    ) -> None:
        self.nvme_quotas = Quotas(nvme_quotas, nvme_slots, policy)
        if nvme_quotas:
            others["make_nvme"] = partial(LimitedNvme, quotas=self.nvme_quotas)
        super().__init__(dram_slots, nvme_slots, policy, **others)
        self.names = names
        self.quotas = Quotas(dram_quotas, dram_slots, policy)
        for order in self.quotas.orders():
            order.depth_of = self.dram.depth_of
        self.dram.on_pin_end = self.quotas.use
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

    def _dram_victims(
        self, whose: QueuePlace | None, run: Run | None, since: float, count: int
    ) -> tuple[list[Chunk], Gives]:
        """One of what is beyond a quota, if one can go; else as without quotas."""
        since_when = since if whose is None else -math.inf
        slot = self.quotas.first_over(lambda tenant: self._own_victim(tenant, since_when))
        if slot is not None:
            return [self.dram.owned[slot]], Gives.CLEAN
        return super()._dram_victims(whose, run, since, count)

    def _make_own_room(self, tenant: bytes, since: float) -> bool:
        """One of the tenant's chunks leaves DRAM, if one can.

        Args:
            since: see _own_victim().
        """
        self.pinning.end(self.now)
        slot = self._own_victim(tenant, since)
        if slot is None:
            return False
        self.counts[Event.EVICTED_DRAM] += 1
        self.leave_dram(self.dram.owned[slot])
        return True

    def _own_victim(self, tenant: bytes, since: float) -> int | None:
        """The tenant's own slot of DRAM to free.

        Args:
            since: when the request came that a save is for. What only DRAM has may go for one that
                came later; see may_be_lost().
        """
        self.dram.place_left()
        owned, growing = self.dram.owned, self.dram.growing

        def is_clean(slot: int) -> bool:
            return self.dram.may_go(slot) and owned[slot].is_behind

        def can_be_lost(slot: int) -> bool:
            return self.dram.may_go(slot) and may_be_lost(owned[slot].run, since, growing)

        slot = self.quotas.victim(tenant, self.now, is_clean)
        if slot is None and since > -math.inf:
            slot = self.quotas.victim(tenant, self.now, can_be_lost)
        return slot

    def _make_room_behind(self, tier: TierBehind, chunk: Chunk) -> bool | None:
        """A tenant that is far beyond its quota, as one that was made smaller may be, gives up more
        than it gets."""
        has_room = super()._make_room_behind(tier, chunk)
        for _ in range(SHRINK_MAX - 1):
            if not has_room or tier.has_room_for(chunk):
                break
            if not super()._make_room_behind(tier, chunk):
                break
        return has_room

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


def tenants_of(quotas: Sequence[Quota]) -> dict[bytes, Quota]:
    """By tenant, as records name it. Reads the salts. Raises ConfigError, in which no salt is."""
    found: dict[bytes, Quota] = {}
    for quota in quotas:
        tenant = tenant_hash(quota.salt())
        if tenant in found:
            raise ConfigError(
                f"quotas.{found[tenant].name} and quotas.{quota.name} are of the same salt, which "
                "can have one quota; take one of them out"
            )
        found[tenant] = quota
    return found


def residency_with(quotas: Sequence[Quota], pool: Pool, slab: Slab) -> Callable[..., Residency]:
    """Residency, or one with quotas. Raises ConfigError, in which no salt is."""
    tenants = tenants_of(quotas)
    if not tenants:
        return Residency
    dram, nvme = (pool.num_slots, pool.slot_bytes), (slab.records_max, slab.record_bytes)
    return partial(
        LimitedResidency,
        dram_quotas={t: slots_of(q.dram, *dram) for t, q in tenants.items() if q.dram is not None},
        nvme_quotas={t: slots_of(q.nvme, *nvme) for t, q in tenants.items() if q.nvme is not None},
        names={tenant: quota.name for tenant, quota in tenants.items()},
    )


def tenant_gauges(
    residency: Residency, slot_bytes: int, record_bytes: int
) -> dict[tuple[str, str], float]:
    """Bytes that each tenant holds and may hold of the tiers that it has a quota of. Without quotas
    there is none."""
    if not isinstance(residency, LimitedResidency):
        return {}
    gauges: dict[tuple[str, str], float] = {}
    tiers = (DRAM, residency.quotas, slot_bytes), (NVME, residency.nvme_quotas, record_bytes)
    for tier, quotas, num_bytes in tiers:
        for tenant, most in quotas.most().items():
            label = f"{residency.names[tenant]}|{tier}"
            gauges["tenant_held_bytes", label] = float(quotas.held(tenant) * num_bytes)
            gauges["tenant_quota_bytes", label] = float(most * num_bytes)
    return gauges
