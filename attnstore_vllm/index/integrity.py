# SPDX-License-Identifier: Apache-2.0
"""The invariants of index/residency.py, asserted. Cost: all chunks; for tests and idle moments."""

from __future__ import annotations

from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.slots import ADOPTED, OWNED, DramSlots, NvmeSlots


def check_integrity(
    index: PrefixIndex, dram: DramSlots, nvme: NvmeSlots, *, nvme_lost: bool
) -> None:
    assert len(dram.free) + len(dram.owned) == dram.num_slots
    assert not set(dram.free) & dram.owned.keys()
    for slot, chunk in dram.owned.items():
        assert chunk.dram_slot == slot
        assert chunk.dram is not Dram.ABSENT
        assert chunk.dropped <= (chunk.holds > 0 or chunk.reads > 0)
        assert not (slot in dram.pins and (slot in dram.clean or slot in dram.dirty))
    assert all(slot in dram.owned for slot in dram.pins)
    nvme.check_integrity()
    owners = 0
    for slot in range(nvme.num_slots):
        if nvme.state[slot] in (OWNED, ADOPTED):
            owners += 1
            chunk = index.chunk(nvme.owner[slot])
            assert chunk.nvme_slot == slot
            assert chunk.nvme is not Nvme.ABSENT
    for chunk in index:
        _check_chunk(chunk)
        owners -= chunk.nvme is not Nvme.ABSENT and not nvme_lost
    assert owners == 0


def _check_chunk(chunk: Chunk) -> None:
    assert not chunk.dropped
    assert chunk.dram is not Dram.ABSENT or chunk.nvme is not Nvme.ABSENT
    assert chunk.name.tokens or chunk.dram is not Dram.READY
