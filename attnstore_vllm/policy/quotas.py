# SPDX-License-Identifier: Apache-2.0
"""Who is over a quota, and which of its own slots goes. Pure: slots and tenants in, slots out.

Only tenants with a quota are counted, so that all others cost nothing. Each has an order of
departure of its own slots, the same as the tier's: so the least worthy of its own goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.visits import Run

LOOKS_MAX = 64
"""Slots that one decision looks at in turn, where those that the order names cannot go."""
OVER_MAX = 4
"""Tenants over their quotas that one decision looks at."""


class _Tenant:
    def __init__(self, name: bytes, number: int, most: int, order: Departures) -> None:
        self.name = name
        self.number = number
        self.most = most
        self.order = order
        self.num_held = 0
        self.look_at = 0
        """In turn: what could not go when it was looked at is looked at again after all others."""


class Quotas:
    """The slots of one tier that tenants with a quota hold.

    Args:
        most: by tenant, the slots that it may hold. 255 tenants at most.
        num_slots: that the tier has; a byte each.
        order: makes an empty order of departure of them: one for each tenant, 8 bytes a slot.
    Cost of each call but victim() and what recovery calls: O(1) a slot.
    """

    def __init__(
        self, most: Mapping[bytes, int], num_slots: int, order: Callable[[int], Departures]
    ) -> None:
        assert len(most) < 256
        self._tenants = {
            tenant: _Tenant(tenant, number, slots, order(num_slots))
            for number, (tenant, slots) in enumerate(most.items(), start=1)
        }
        self._numbered = [*self._tenants.values()]
        self._of = bytearray(num_slots if most else 0)
        """By slot, the number of its tenant; 0: it is not counted."""
        self.over: dict[bytes, None] = {}
        """Tenants that hold more than they may, the longest so first."""

    def orders(self) -> list[Departures]:
        return [tenant.order for tenant in self._tenants.values()]

    def order_of(self, tenant: bytes) -> Departures:
        """The order of departure of the tenant's own slots."""
        return self._tenants[tenant].order

    def __contains__(self, slot: object) -> bool:
        """Whether the slot is counted."""
        return isinstance(slot, int) and self._tenant_of(slot) is not None

    def held(self, tenant: bytes) -> int:
        return self._tenants[tenant].num_held

    def most(self) -> dict[bytes, int]:
        """By tenant, the slots that it may hold."""
        return {tenant: found.most for tenant, found in self._tenants.items()}

    def is_full(self, tenant: bytes) -> bool:
        """Whether one slot more would be beyond its quota. False for a tenant without."""
        found = self._tenants.get(tenant)
        return found is not None and found.num_held >= found.most

    def add(self, tenant: bytes, slot: int, run: Run) -> None:
        """The slot is the tenant's from now on."""
        found = self._tenants.get(tenant)
        if found is None:
            return
        assert not self._of[slot]
        self._of[slot] = found.number
        found.order.add(slot, run)
        self._count(found, 1)

    def remove(self, slot: int) -> None:
        """The slot is free, if it was of a tenant with a quota."""
        found = self._tenant_of(slot)
        if found is None:
            return
        self._of[slot] = 0
        if slot in found.order:  # else recovery goes on
            found.order.remove(slot)
        self._count(found, -1)

    def use(self, slots: Sequence[int], run: Run) -> None:
        """A run uses those of these that are counted here, in the order of depth. They are of one
        tenant, as all that a request finds is."""
        of = self._of
        counted = [slot for slot in slots if slot >= 0 and of[slot]] if of else []
        if not counted:
            return
        order = self._numbered[of[counted[0]] - 1].order
        found = [slot for slot in counted if slot not in order]  # while recovery goes on
        if found:
            order.add_all(found, run)
        order.use(counted, run)

    def victim(self, tenant: bytes, now: float, can_go: Callable[[int], bool]) -> int | None:
        """The tenant's own slot to free, or None if none that was looked at can go.

        Cost: that of the order, and LOOKS_MAX looks. A later call looks at others.
        """
        found = self._tenants[tenant]
        slot = found.order.victim(now, can_go)
        if slot is not None:
            return slot
        for _ in range(min(LOOKS_MAX, found.num_held)):
            slot = self._of.find(found.number, found.look_at)
            slot = self._of.find(found.number) if slot < 0 else slot
            if can_go(slot):
                return slot
            found.look_at = slot + 1
        return None

    def first_over(self, victim: Callable[[bytes], int | None]) -> int | None:
        """The slot that `victim` finds of the first tenants over their quotas. Who has none is last
        from then on. Cost: OVER_MAX calls."""
        for tenant in [*islice(self.over, OVER_MAX)]:
            slot = victim(tenant)
            if slot is not None:
                return slot
            self.over[tenant] = self.over.pop(tenant)
        return None

    # ---- recovery ------------------------------------------------------------------------

    def add_found(self, tenants: npt.NDArray[np.bytes_], slots: npt.NDArray[np.uint32]) -> None:
        """These slots are of these tenants, and in no order before add_oldest() or a use.

        Args:
            tenants: [len(slots)] of 32 bytes.
        Cost: a comparison of each with each tenant that has a quota.
        """
        for tenant, found in self._tenants.items():
            own = slots[tenants == tenant]
            for slot in own.tolist():
                assert not self._of[slot]
                self._of[slot] = found.number
            self._count(found, len(own))

    def add_oldest(
        self,
        slots: npt.NDArray[np.int32],
        now: float,
        ends: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Nothing has used these since add_found(). See Departures.add_oldest()."""
        of = np.frombuffer(self._of, np.uint8)[slots]
        for found in self._tenants.values():
            own = of == found.number
            found.order.add_oldest(slots[own], now, None if ends is None else ends[own])

    # ---- how it is kept ------------------------------------------------------------------

    def _tenant_of(self, slot: int) -> _Tenant | None:
        number = self._of[slot] if 0 <= slot < len(self._of) else 0
        return self._numbered[number - 1] if number else None

    def _count(self, found: _Tenant, change: int) -> None:
        found.num_held += change
        if found.num_held > found.most:
            self.over.setdefault(found.name)
        else:
            self.over.pop(found.name, None)

    def check_integrity(self, owners: Iterable[tuple[int, bytes]]) -> None:
        """Assert that a recount says the same.

        Args:
            owners: each slot in use that is to be counted, and its tenant.
        """
        counted = {slot: tenant for slot, tenant in owners if tenant in self._tenants}
        of = {slot: number for slot, number in enumerate(self._of) if number}
        assert {slot: self._tenants[tenant].number for slot, tenant in counted.items()} == of
        for tenant, found in self._tenants.items():
            own = [slot for slot, number in of.items() if number == found.number]
            assert found.num_held == len(own)
            assert len(found.order) <= len(own)
            assert sum(slot in found.order for slot in own) == len(found.order)
            is_over = tenant in self.over
            assert is_over == (found.num_held > found.most)
