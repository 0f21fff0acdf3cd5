# SPDX-License-Identifier: Apache-2.0
"""NVMe in which tenants have quotas. Where the settings have none, NvmeTier is used as it is.

A tenant at its quota makes room for itself, also where slots are free: its own least worthy chunk
goes, if the new one is worth that by the tier's own rules. Else the new one is not written. What is
beyond a quota goes before all others when NVMe is full. After a restart each record is counted for
the tenant that its header states, so a quota that was made smaller holds for what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.eviction.rules import Gives
from attnstore_vllm.policy.quotas import Quotas
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.nvme.format import tenants
from attnstore_vllm.tiers.nvme.nvme_tier import ADOPTED, FREE, OWNED, Adopted, NvmeTier
from attnstore_vllm.types import NVME


class LimitedNvme(NvmeTier):
    """Costs beside NvmeTier's a byte a slot, and for each tenant with a quota 8 bytes a slot.

    Args:
        quotas: of as many slots, none of which is counted.
    Others: see NvmeTier.
    """

    def __init__(self, *given: Any, quotas: Quotas, **others: Any) -> None:
        super().__init__(*given, **others)
        self.quotas = quotas

    def orders(self) -> list[Departures]:
        return [*super().orders(), *self.quotas.orders()]

    def give(self, chunk: Chunk) -> int:
        slot = super().give(chunk)
        self.quotas.add(chunk.name.tenant, slot, chunk.run)
        return slot

    def _leave_order(self, slot: int) -> None:
        """A dropped chunk is not the tenant's any more, though a device may still touch it."""
        super()._leave_order(slot)
        self.quotas.remove(slot)

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        super().use(chunks, run)
        self.quotas.use([chunk.behind[NVME].slot for chunk in chunks if NVME in chunk.behind], run)

    def _come_back(self, slot: int, run: Run) -> None:
        super()._come_back(slot, run)
        self.quotas.use([slot], run)

    def adopt(
        self,
        headers: memoryview,
        slots: npt.NDArray[np.uint32],
        header_bytes: int,
        ends: npt.NDArray[np.float64] | None = None,
    ) -> Adopted:
        was_free = self.states()[slots] == FREE
        found = super().adopt(headers, slots, header_bytes, ends)
        new = was_free & (self.states()[slots] == ADOPTED)
        self.quotas.add_found(tenants(headers, header_bytes)[: len(slots)][new], slots[new])
        return found

    def all_adopted(self, slots: npt.NDArray[np.int32], now: float) -> None:
        unused, ends = slots[self.states()[slots] == ADOPTED], self._ends
        super().all_adopted(slots, now)
        self.quotas.add_oldest(unused, now, None if ends is None else ends[unused])

    # ---- room ----------------------------------------------------------------------------

    def has_room_for(self, chunk: Chunk) -> bool:
        return super().has_room_for(chunk) and not self.quotas.is_full(chunk.name.tenant)

    def victim(self, chunk: Chunk, now: float) -> tuple[int | None, bool]:
        """See TierBehind. Who is at its quota is refused where none of its own can go: others are
        not to wait for it."""
        quotas, tenant = self.quotas, chunk.name.tenant
        own = partial(quotas.victim, now=now, can_go=self._own_can_go)
        if quotas.is_full(tenant):
            slot, order = own(tenant), quotas.order_of(tenant)
            gives = self._gives_up(order, slot, chunk, now, lambda: False)
            return (slot, False) if gives is Gives.CLEAN else (None, True)
        slot = quotas.first_over(own)
        return (slot, False) if slot is not None else super().victim(chunk, now)

    def _own_can_go(self, slot: int) -> bool:
        """Pinned ones stand in the orders of tenants, too."""
        is_found = self.state[slot] in (OWNED, ADOPTED)
        return is_found and slot not in self.pins and self._can_go(slot)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.quotas.check_integrity(
            (slot, self._index.chunk(self.owner[slot]).name.tenant)
            for slot, state in enumerate(self.state)
            if state in (OWNED, ADOPTED)
        )
