# SPDX-License-Identifier: Apache-2.0
"""Who makes room in a full tier: what nobody waits for first, then the farthest in the queue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.slots import DramSlots, NvmeSlots
from attnstore_vllm.policy.lookahead import LAST, LookAhead, Order
from attnstore_vllm.policy.pins import Pins

SAVES_PART = 8
"""One slot in so many is kept for what is saved and not yet written, or saves would push out what
was read for the requests at the window's end, to be read again."""

DIRTY_PART = 2
"""When more than one slot in so many is dirty and nothing is written, reads may take what is
nowhere else."""


class DramRoom:
    """Keeps the chunks of DRAM in the orders of departure that their state and the queue say."""

    def __init__(self, dram: DramSlots, look_ahead: LookAhead) -> None:
        self._dram = dram
        self._look_ahead = look_ahead
        self.writes_stalled = False
        """Nothing is being written, though the keeper has just looked for what could be."""

    def want(self, request_id: str, chunks: Sequence[Chunk]) -> None:
        """What a waiting request wants, in place of what it wanted before."""
        absent = [chunk for chunk in chunks if chunk.dram is Dram.ABSENT]
        new, unwanted = self._look_ahead.want(request_id, chunks, absent)
        for chunk in (*new, *unwanted):
            assert isinstance(chunk, Chunk)
            self.place(chunk)

    def leave_queue(self, request_id: str) -> None:
        """The request runs, or was aborted."""
        for chunk in self._look_ahead.remove(request_id):
            assert isinstance(chunk, Chunk)
            self.place(chunk)

    def lose(self, chunk: Chunk) -> None:
        """The chunk is not found any more."""
        self.place(chunk)
        for unwanted in self._look_ahead.lost(chunk):
            assert isinstance(unwanted, Chunk)
            self.place(unwanted)

    def place(self, chunk: Chunk) -> None:
        """Said whenever the chunk's state has changed."""
        if chunk.dram is Dram.ABSENT:
            return
        may_go = chunk.nvme is Nvme.READY or chunk.refused
        order = self._dram.clean if may_go else self._dram.dirty
        stays = chunk.dram is not Dram.READY or chunk.dropped or self._look_ahead.is_wanted(chunk)
        stays |= chunk.dram_slot in self._dram.pins
        self._dram.place(chunk, None if stays else order)

    def is_full_of_wanted(self, whose: Order) -> bool:
        """Whether a read for this request may only take the place of what farther ones want."""
        dram = self._dram
        num_staying = len(dram.owned) - len(dram.clean) - len(dram.dirty)
        limit = dram.num_slots - dram.num_slots // SAVES_PART
        return num_staying >= limit and whose != self._look_ahead.first

    def farther(self, whose: Order | None) -> Chunk | None:
        """What only requests beyond this one want, and can be read again."""
        wanted = self._look_ahead.farthest(whose, self._can_be_fetched_again)
        assert wanted is None or isinstance(wanted, Chunk)
        return wanted

    def victim(self, now: float, whose: Order | None) -> tuple[Chunk | None, bool]:
        """The chunk to evict, or None if none can go; and whether somebody waits for it.

        First what nobody waits for and NVMe has too, or has refused; then what only requests beyond
        `whose` wait for and NVMe has too. What is to be written yet would be lost: it goes for a
        save alone (`whose` is None), which brings what nobody has; for what a request waits for
        only if most is dirty and the disk takes nothing: else it would wait for nothing.
        """
        dram = self._dram

        def can_go(slot: int) -> bool:
            return dram.owned[slot].holds == 0

        slot = dram.clean.victim(now, can_go)
        if slot is None:
            wanted = self.farther(whose)
            if wanted is not None:
                return wanted, True
            is_stuck = self.writes_stalled and len(dram.dirty) > dram.num_slots // DIRTY_PART
            if whose is None or (is_stuck and whose != LAST):
                slot = dram.dirty.victim(now, can_go)
        return (dram.owned[slot] if slot is not None else None), False

    def _can_be_fetched_again(self, chunk: Hashable) -> bool:
        assert isinstance(chunk, Chunk)
        is_ready = chunk.dram is Dram.READY and chunk.nvme is Nvme.READY
        return is_ready and chunk.holds == 0 and chunk.dram_slot not in self._dram.pins


class NvmeRoom:
    """Who leaves NVMe for a chunk that is to be written, or that it is not worth anybody's slot."""

    def __init__(
        self, nvme: NvmeSlots, dram_pins: Pins, index: PrefixIndex, look_ahead: LookAhead
    ) -> None:
        self._nvme = nvme
        self._dram_pins = dram_pins
        self._index = index
        self._look_ahead = look_ahead

    def victim(self, chunk: Chunk, now: float) -> tuple[int | None, bool]:
        """The slot to free, None if none can go; and then, whether the chunk is refused.

        What somebody waits for goes only if nothing else is found, the farthest first, and only
        for what somebody waits for too, or has pinned.
        """
        slot = self._nvme.policy.victim(now, self._can_go)
        if self._look_ahead.is_wanted(chunk) or chunk.dram_slot in self._dram_pins:
            return (slot if slot is not None else self._farthest()), False
        if slot is None:
            return None, self._farthest() is not None
        is_refused = not self._nvme.policy.admits(chunk.run, slot, now)
        return (None if is_refused else slot), is_refused

    def _can_go(self, slot: int) -> bool:
        chunk = self._index.live(self._nvme.owner[slot])
        return chunk is None or (
            chunk.reads == 0 and chunk.nvme is Nvme.READY and not self._look_ahead.is_wanted(chunk)
        )

    def _farthest(self) -> int | None:
        chunk = self._look_ahead.farthest_of_all(self._can_leave)
        assert chunk is None or isinstance(chunk, Chunk)
        return chunk.nvme_slot if chunk is not None else None

    def _can_leave(self, chunk: Hashable) -> bool:
        assert isinstance(chunk, Chunk)
        may_go = chunk.reads == 0 and chunk.nvme is Nvme.READY and not chunk.dropped
        return may_go and chunk.nvme_slot not in self._nvme.pins
