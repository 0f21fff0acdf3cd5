# SPDX-License-Identifier: Apache-2.0
"""Who makes room in a full tier: what nobody waits for first, then the farthest in the queue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.slots import DramSlots, NvmeSlots
from attnstore_vllm.policy.lookahead import LookAhead, Order


class DramRoom:
    """Keeps the chunks of DRAM in the orders of departure that their state and the queue say."""

    def __init__(self, dram: DramSlots, look_ahead: LookAhead) -> None:
        self._dram = dram
        self._look_ahead = look_ahead

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

    def place(self, chunk: Chunk) -> None:
        """Said whenever the chunk's state has changed."""
        if chunk.dram is Dram.ABSENT:
            return
        order = self._dram.clean if chunk.nvme is Nvme.READY else self._dram.dirty
        stays = chunk.dram is not Dram.READY or chunk.dropped or self._look_ahead.is_wanted(chunk)
        stays |= chunk.dram_slot in self._dram.pins
        self._dram.place(chunk, None if stays else order)

    def victim(self, now: float, whose: Order | None) -> tuple[Chunk | None, bool]:
        """The chunk to evict, or None if none can go; and whether somebody waits for it.

        First what NVMe has too and nobody waits for, then what only requests beyond `whose` wait
        for and NVMe has too. What NVMe has not would be lost: it goes for a save alone (`whose` is
        None), which brings what nobody has yet; and never for a read, which can be done later.
        """
        dram = self._dram

        def can_go(slot: int) -> bool:
            return dram.owned[slot].holds == 0

        slot = dram.clean.victim(now, can_go)
        if slot is None:
            wanted = self._look_ahead.farthest(whose, self._can_be_fetched_again)
            if wanted is not None:
                assert isinstance(wanted, Chunk)
                return wanted, True
            if whose is None:
                slot = dram.dirty.victim(now, can_go)
        return (dram.owned[slot] if slot is not None else None), False

    def _can_be_fetched_again(self, chunk: Hashable) -> bool:
        assert isinstance(chunk, Chunk)
        is_ready = chunk.dram is Dram.READY and chunk.nvme is Nvme.READY
        return is_ready and chunk.holds == 0 and chunk.dram_slot not in self._dram.pins


def nvme_victim(
    nvme: NvmeSlots, index: PrefixIndex, look_ahead: LookAhead, now: float
) -> int | None:
    """The slot to free, whether or not DRAM has its chunk; None if none can go.

    What somebody waits for goes only if nothing else is found.
    """

    def can_go(slot: int) -> bool:
        chunk = index.live(nvme.owner[slot])
        return chunk is None or (chunk.reads == 0 and chunk.nvme is Nvme.READY)

    def is_not_wanted(slot: int) -> bool:
        chunk = index.live(nvme.owner[slot])
        return chunk is None or (can_go(slot) and not look_ahead.is_wanted(chunk))

    slot = nvme.policy.victim(now, is_not_wanted)
    return slot if slot is not None else nvme.policy.victim(now, can_go)
