# SPDX-License-Identifier: Apache-2.0
"""Who makes room in a full tier: what nobody waits for first, then the farthest in the queue."""

from __future__ import annotations

from collections.abc import Hashable

from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.slots import DramSlots, NvmeSlots
from attnstore_vllm.policy.lookahead import LookAhead, Order


def dram_victim(
    dram: DramSlots, look_ahead: LookAhead, now: float, whose: Order | None
) -> tuple[Chunk | None, bool]:
    """The chunk to evict, or None if none can go; and whether somebody waits for it.

    What is waited for goes only if NVMe has it too, and if it is wanted after the request for which
    the room is made; `whose` is None for a save, which comes before all that only waits.
    """

    def can_go(slot: int) -> bool:
        chunk = dram.owned[slot]
        if chunk.holds or chunk.dram is not Dram.READY:
            return False
        return not look_ahead.is_wanted(chunk)

    slot = dram.policy.victim(now, can_go, lambda slot: dram.owned[slot].nvme is Nvme.READY)
    if slot is not None:
        return dram.owned[slot], False
    wanted = look_ahead.farthest(whose, _can_be_fetched_again)
    assert wanted is None or isinstance(wanted, Chunk)
    return wanted, True


def _can_be_fetched_again(chunk: Hashable) -> bool:
    assert isinstance(chunk, Chunk)
    return chunk.holds == 0 and chunk.dram is Dram.READY and chunk.nvme is Nvme.READY


def nvme_victim(
    nvme: NvmeSlots, index: PrefixIndex, look_ahead: LookAhead, now: float
) -> int | None:
    """The slot to free, whether or not DRAM has its chunk; None if none can go."""

    def can_go(slot: int) -> bool:
        chunk = index.live(nvme.owner[slot])
        if chunk is None:
            return True
        if chunk.reads or chunk.nvme is not Nvme.READY:
            return False
        return not look_ahead.is_wanted(chunk)

    return nvme.policy.victim(now, can_go)
