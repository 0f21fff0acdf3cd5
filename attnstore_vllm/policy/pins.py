# SPDX-License-Identifier: Apache-2.0
"""Which slots of a tier are pinned, for whom and until when. Pure: time is given.

All pins together, and those of each tenant, have a share of the tier's slots. A pin beyond it is
refused, so no tenant can take another's room, or more of it than the operator has allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

ENDED_MAX = 64
"""Pins that one look ends."""
STALE_MAX = 16
"""The heap forgets what is not pinned any more when it is more than this and what is."""


@dataclass(frozen=True, slots=True)
class Pin:
    tenant: bytes
    until: float


class Pins:
    """The pins of one tier. State: the pins. Cost of each call: O(log pins), amortized."""

    def __init__(self, share: float = 0.0, tenant_share: float = 0.0) -> None:
        self._share = share
        self._tenant_share = tenant_share
        self._pins: dict[int, Pin] = {}
        self._per_tenant: Counter[bytes] = Counter()
        self._ends: list[tuple[float, int]] = []  # a heap; may name what has gone or lasts longer

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pins)

    def __contains__(self, slot: int) -> bool:
        return slot in self._pins

    def get(self, slot: int) -> Pin | None:
        return self._pins.get(slot)

    def add(self, slot: int, pin: Pin, num_slots: int) -> bool:
        """Pin the slot, or let its pin last longer. False: it would be beyond the share.

        Args:
            num_slots: that the tier has now.
        """
        before = self._pins.get(slot)
        if before is not None:
            if before.until >= pin.until:
                return True
            pin = Pin(before.tenant, pin.until)
        else:
            if len(self._pins) >= int(self._share * num_slots):
                return False
            if self._per_tenant[pin.tenant] >= int(self._tenant_share * num_slots):
                return False
            self._per_tenant[pin.tenant] += 1
        self._pins[slot] = pin
        heappush(self._ends, (pin.until, slot))
        if len(self._ends) > 2 * len(self._pins) + STALE_MAX:
            self._ends = [(pin.until, slot) for slot, pin in self._pins.items()]
            heapify(self._ends)
        return True

    def remove(self, slot: int) -> None:
        """The slot is pinned no longer, if it was."""
        pin = self._pins.pop(slot, None)
        if pin is not None:
            self._per_tenant[pin.tenant] -= 1
            if not self._per_tenant[pin.tenant]:
                del self._per_tenant[pin.tenant]

    def take_ended(self, now: float) -> list[int]:
        """Slots whose pin has ended, ENDED_MAX at most; they are pinned no longer."""
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= now and len(ended) < ENDED_MAX:
            _, slot = heappop(self._ends)
            pin = self._pins.get(slot)
            if pin is not None and pin.until <= now:
                self.remove(slot)
                ended.append(slot)
        return ended
