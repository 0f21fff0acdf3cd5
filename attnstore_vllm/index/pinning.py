# SPDX-License-Identifier: Apache-2.0
"""Pinned chunks: they stand in no order of departure until their pins end.

A pin is of a slot, and each tier counts its own. What is pinned in one tier is pinned in the other
too when it gets there, as far as the share allows; where it is refused the chunk may leave.
"""

from __future__ import annotations

from collections import Counter

from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.index.room import DramRoom
from attnstore_vllm.index.slots import DramSlots, NvmeSlots
from attnstore_vllm.policy.pins import Pin
from attnstore_vllm.policy.returns import Run


class Pinning:
    def __init__(
        self, dram: DramSlots, nvme: NvmeSlots, room: DramRoom, counts: Counter[str]
    ) -> None:
        self._dram = dram
        self._nvme = nvme
        self._room = room
        self._counts = counts

    def of(self, chunk: Chunk, now: float) -> Pin | None:
        """What keeps the chunk now."""
        pin = self._dram.pins.get(chunk.dram_slot) or self._nvme.pins.get(chunk.nvme_slot)
        return pin if pin is not None and pin.until > now else None

    def pin(self, chunk: Chunk, until: float, now: float) -> None:
        """Keep the chunk in each tier that it is in. A tier that refuses is counted."""
        if until <= now or chunk.dropped:
            return
        self.end(now)  # what has ended is nobody's share any more
        pin = Pin(chunk.name.tenant, until)
        if chunk.dram is not Dram.ABSENT:
            dram = self._dram
            is_new = chunk.dram_slot not in dram.pins
            self._count(is_new, dram.pins.add(chunk.dram_slot, pin, dram.num_slots))
            self._room.place(chunk)
        if chunk.nvme is not Nvme.ABSENT:
            is_new = chunk.nvme_slot not in self._nvme.pins
            self._count(is_new, self._nvme.pin(chunk.nvme_slot, pin))

    def _count(self, is_new: bool, accepted: bool) -> None:
        if is_new:
            self._counts["pinned" if accepted else "pin_refused"] += 1

    def spread(self, chunk: Chunk, now: float) -> None:
        """The chunk has come into another tier."""
        pin = self.of(chunk, now)
        if pin is not None:
            self.pin(chunk, pin.until, now)

    def inherit(self, chunk: Chunk, tail: Chunk, now: float) -> None:
        """The chunk takes the place of a tail, which is dropped then."""
        pin = self.of(tail, now)
        if pin is None:
            return
        self._dram.pins.remove(tail.dram_slot)
        if tail.nvme_slot in self._nvme.pins:
            self._nvme.pins.remove(tail.nvme_slot)
            self._nvme.unpin(tail.nvme_slot, tail.run)
        self.pin(chunk, pin.until, now)

    def end(self, now: float) -> None:
        """Let go what is pinned no longer, as if it had been used now. Cost: bounded."""
        if not self._dram.pins and not self._nvme.pins:
            return
        renewed: dict[Run, Run] = {}

        def renew(run: Run) -> Run:
            return renewed.setdefault(run, run.renewed(now))

        for slot in self._dram.pins.take_ended(now):
            chunk = self._dram.owned[slot]
            chunk.run = renew(chunk.run)
            self._room.place(chunk)
        for slot in self._nvme.pins.take_ended(now):
            run = self._nvme.run_of(slot)
            assert run is not None
            self._nvme.unpin(slot, renew(run))
