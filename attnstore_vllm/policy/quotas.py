# SPDX-License-Identifier: Apache-2.0
"""Who is over a quota, and which of its own slots goes. Pure: slots and tenants in, slots out.

Only tenants with a quota are counted, so that all others cost nothing. Each has an order of
departure of its own slots, the same as the tier's: so the least worthy of its own goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.visits import Run

LOOKS_MAX = 64
"""Slots that one decision looks at in turn, where those that the order names cannot go."""


class _Tenant:
    def __init__(self, most: int, order: Departures) -> None:
        self.most = most
        self.order = order
        self.slots: OrderedDict[int, None] = OrderedDict()
        """In turn: those that could not go when they were looked at are the last."""


class Quotas:
    """The slots of one tier that tenants with a quota hold.

    Args:
        most: by tenant, the slots that it may hold.
        order: makes an empty order of departure. Each costs 8 bytes a slot of the tier.
    Cost of each call but victim(): O(1) a slot.
    """

    def __init__(self, most: Mapping[bytes, int], order: Callable[[], Departures]) -> None:
        self._tenants = {tenant: _Tenant(number, order()) for tenant, number in most.items()}
        self._of: dict[int, bytes] = {}
        self.over: dict[bytes, None] = {}
        """Tenants that hold more than they may, the longest so first."""

    def orders(self) -> list[Departures]:
        return [tenant.order for tenant in self._tenants.values()]

    def __contains__(self, slot: object) -> bool:
        """Whether the slot is counted."""
        return slot in self._of

    def held(self, tenant: bytes) -> int:
        return len(self._tenants[tenant].slots)

    def most(self, tenant: bytes) -> int:
        return self._tenants[tenant].most

    def is_full(self, tenant: bytes) -> bool:
        """Whether one slot more would be beyond its quota. False for a tenant without."""
        found = self._tenants.get(tenant)
        return found is not None and len(found.slots) >= found.most

    def add(self, tenant: bytes, slot: int, run: Run) -> None:
        """The slot is the tenant's from now on."""
        found = self._tenants.get(tenant)
        if found is None:
            return
        assert slot not in self._of
        self._of[slot] = tenant
        found.slots[slot] = None
        found.order.add(slot, run)
        if len(found.slots) > found.most:
            self.over.setdefault(tenant)

    def remove(self, slot: int) -> None:
        """The slot is free, if it was of a tenant with a quota."""
        tenant = self._of.pop(slot, None)
        if tenant is None:
            return
        found = self._tenants[tenant]
        del found.slots[slot]
        found.order.remove(slot)
        if len(found.slots) <= found.most:
            self.over.pop(tenant, None)

    def use(self, slots: Sequence[int], run: Run) -> None:
        """A run uses those of these that are counted here, in the order of depth. They are of one
        tenant, as all that a request finds is."""
        counted = [slot for slot in slots if slot in self._of]
        if counted:
            self._tenants[self._of[counted[0]]].order.use(counted, run)

    def victim(self, tenant: bytes, now: float, can_go: Callable[[int], bool]) -> int | None:
        """The tenant's own slot to free, or None if none that was looked at can go.

        Cost: that of the order, and LOOKS_MAX looks. A later call looks at others.
        """
        found = self._tenants[tenant]
        slot = found.order.victim(now, can_go)
        if slot is not None:
            return slot
        for _ in range(min(LOOKS_MAX, len(found.slots))):
            slot = next(iter(found.slots))
            if can_go(slot):
                return slot
            found.slots.move_to_end(slot)
        return None

    def check_integrity(self, owners: Iterable[tuple[int, bytes]]) -> None:
        """Assert that a recount says the same.

        Args:
            owners: each slot in use that is to be counted, and its tenant.
        """
        counted = {slot: tenant for slot, tenant in owners if tenant in self._tenants}
        assert counted == self._of
        for tenant, found in self._tenants.items():
            assert set(found.slots) == {slot for slot, of in counted.items() if of == tenant}
            assert len(found.order) == len(found.slots)
            is_over = tenant in self.over
            assert is_over == (len(found.slots) > found.most)
