# SPDX-License-Identifier: Apache-2.0
"""Pinned chunks: they stand in no order of departure until their pins end.

A pin is of a slot, and each tier counts its own. What is pinned in one tier is pinned in another
too when it gets there, as far as the share allows; where it is refused the chunk may leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.tier import Pin, Tier
from attnstore_vllm.types import Event


class Pinning:
    def __init__(self, tiers: Sequence[Tier], counts: Counter[str]) -> None:
        self._tiers = tiers
        self._counts = counts

    def of(self, chunk: Chunk, now: float) -> Pin | None:
        """The pin that keeps the chunk now."""
        for tier in self._tiers:
            pin = tier.pins.get(tier.copy_of(chunk).slot)
            if pin is not None:
                return pin if pin.until > now else None
        return None

    def pin(self, chunk: Chunk, until: float, now: float) -> None:
        """Keep the chunk in each tier that it is in. A tier that refuses is counted."""
        if until <= now or chunk.dropped:
            return
        self.end(now)  # what has ended is no share any more
        pin = Pin(chunk.name.tenant, until)
        for tier in self._tiers:
            copy = tier.copy_of(chunk)
            if copy.state is State.ABSENT:
                continue
            is_new = copy.slot not in tier.pins
            accepted = tier.pin(chunk, pin)
            if is_new:
                self._counts[Event.PINNED if accepted else Event.PIN_REFUSED] += 1

    def spread(self, chunk: Chunk, now: float) -> None:
        """The chunk has come into another tier."""
        pin = self.of(chunk, now)
        if pin is not None:
            self.pin(chunk, pin.until, now)

    def inherit(self, chunk: Chunk, tail: Chunk, now: float, most: float) -> None:
        """The chunk takes the place of a tail, which is dropped then.

        Args:
            most: it is pinned until then at the latest.
        """
        pin = self.of(tail, now)
        if pin is None:
            return
        for tier in self._tiers:
            tier.unpin(tail)
        self.pin(chunk, min(pin.until, most), now)

    def end(self, now: float) -> None:
        """Let go what is pinned no longer, as if it had been used now. Cost: bounded."""
        for tier in self._tiers:  # without a generator: it is asked before each eviction
            if tier.pins:
                break
        else:
            return
        renewed: dict[Run, Run] = {}
        for tier in self._tiers:
            tier.end_pins(now, lambda run: renewed.setdefault(run, run.renewed(now)))
