# SPDX-License-Identifier: Apache-2.0
"""KV tensors and slots that a copy engine works on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnstore_lab.testing.memory_engine import MemoryEngine, Stream
from attnstore_vllm.transfer.engine import CopyEngine, CpuEngine
from attnstore_vllm.transfer.geometry import SLOT_ALIGNMENT_BYTES, Geometry
from attnstore_vllm.transfer.layout import describe

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 3, 24, 2, 4, 6
WITHIN, SLOTS, ROWS = 3, 7, 5
PAGE_BYTES = HEADS * BLOCK_TOKENS * CONTENT * 2
ALL = range(LAYERS)
ORDERS = [
    (0, 1, 2, 3),  # blocks, heads, tokens, content
    (0, 2, 1, 3),  # tokens before heads
    (1, 0, 2, 3),  # heads outermost: a run a head
    (0, 1, 3, 2),  # content before tokens, as the CPU's attention packs keys
]
Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]


class Rig:
    """The KV tensors of one rank, every byte random, and beside them slots full of zeros.

    Args:
        streams: of a MemoryEngine, for loads and for saves; None: it is a CpuEngine.
        options: of a MemoryEngine.
    """

    def __init__(
        self,
        order: tuple[int, ...],
        streams: tuple[Stream, Stream] | None,
        *,
        num_ranks: int = 1,
        rank: int = 0,
        seed: int = 7,
        **options: Any,
    ) -> None:
        sizes = (BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
        rng = torch.Generator().manual_seed(seed)
        self._block_axis = order.index(0)
        self.tensors = [
            torch.randint(-(2**15), 2**15, [sizes[axis] for axis in order], generator=rng).short()
            for _ in ALL
        ]
        self.layers = [
            stored.permute([order.index(axis) for axis in range(4)]) for stored in self.tensors
        ]
        self.geometry = Geometry.uniform(
            num_ranks, LAYERS, BLOCK_TOKENS, PAGE_BYTES, WITHIN * BLOCK_TOKENS
        )
        self.slots = new_slots(SLOTS, self.geometry)
        layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(self.layers)]
        where = (self.slots.ctypes.data, SLOTS, rank, self.geometry, layouts)
        self.engine: CopyEngine
        if streams is None:
            self.engine = CpuEngine(*where)
        else:
            loads, saves = streams
            self.engine = MemoryEngine(*where, loads=loads, saves=saves, num_rows=ROWS, **options)
        at = rank * self.geometry.rank_bytes
        mine = self.slots[:, at : at + self.geometry.rank_bytes]
        self.pages = mine.reshape(SLOTS, LAYERS, WITHIN, PAGE_BYTES)  # of this rank
        assert np.shares_memory(self.pages, self.slots)

    def hbm(self) -> Bytes:
        """A copy of all: [layer, block, page bytes], the bytes in the order of their addresses."""
        blocks = [stored.movedim(self._block_axis, 0).numpy() for stored in self.tensors]
        return np.stack([b.reshape(BLOCKS, -1).view(np.uint8) for b in blocks])

    def overwrite(self, block: int) -> None:
        """As the model does with a block that it was given."""
        for kv in self.layers:
            kv[block] += 1

    def load(self, pages: Table, layers: range = ALL) -> None:
        self.engine.wait(self.engine.load(pages, layers))

    def save(self, pages: Table, layers: range = ALL) -> None:
        self.engine.wait(self.engine.save(pages, layers))


def new_slots(num_slots: int, geometry: Geometry) -> Bytes:
    """All zero; from the beginning of a page of memory on, as the pool has them."""
    memory = np.zeros(num_slots * geometry.slot_bytes + SLOT_ALIGNMENT_BYTES, np.uint8)
    first = -memory.ctypes.data % SLOT_ALIGNMENT_BYTES
    return memory[first:][: num_slots * geometry.slot_bytes].reshape(num_slots, -1)


def table(*pages: tuple[int, int, int]) -> Table:
    """Slot, block of the chunk, block id."""
    return np.array(pages, np.int64).reshape(-1, 3)
