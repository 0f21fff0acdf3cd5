# SPDX-License-Identifier: Apache-2.0
"""Copies between a worker's HBM and its part of the pool's slots: the device seam.

CpuCopier is for vLLM's CPU build, where HBM is ordinary memory; CudaCopier
(transfer/cuda_copier.py) for CUDA. Both move bytes as vLLM wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attnstore_vllm._native import CopyQueue
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.plan import PageCopy, TransferPlan

Addresses = npt.NDArray[np.uint64]


class Copier(Protocol):
    """One worker's copies. A step calls start_loads, wait_layer for each layer, then save."""

    def start_loads(self, plans: Sequence[TransferPlan]) -> None:
        """Begin to fill blocks from slots; what wait_layer() has returned for is complete."""

    def wait_layer(self, layer: int) -> None:
        """Return when this layer of every load begun in this step may be read."""

    def save(self, plans: Sequence[TransferPlan]) -> None:
        """Copy blocks into slots. When it returns, the blocks may be given away."""

    def finished(self) -> list[int]:
        """Ids of plans completed since the last call; each once."""

    def close(self) -> None:
        """Complete what is in flight."""


class PageAddresses:
    """Turns copies into addresses in this process's KV tensors and pool mapping.

    Args:
        slots_base: address of the pool's slot 0.
        layouts: of the layers, in the order in which slots hold them.
    """

    def __init__(
        self, slots_base: int, rank: int, geometry: Geometry, layouts: Sequence[LayerLayout]
    ) -> None:
        assert len(layouts) == geometry.num_layers
        assert all(layout.page_bytes == geometry.page_bytes for layout in layouts)
        self._geometry = geometry
        self._layouts = layouts
        self._base = slots_base + rank * geometry.rank_bytes

    def __call__(self, layer: int, copies: npt.NDArray[np.int64]) -> tuple[Addresses, Addresses]:
        """(slot side, HBM side) of each contiguous run of these copies in one layer.

        Args:
            copies: [n, 3]: slot, block in the chunk, block id.
        """
        g, layout = self._geometry, self._layouts[layer]
        assert int(copies[:, 2].max()) < layout.num_blocks
        runs = np.arange(len(layout.run_offsets), dtype=np.int64) * layout.run_bytes
        slots = copies[:, 0] * g.slot_bytes + copies[:, 1] * g.page_bytes
        slots += self._base + layer * g.layer_bytes
        blocks = layout.base + copies[:, 2] * layout.block_stride
        offsets = np.array(layout.run_offsets, dtype=np.int64)
        in_slot = (slots[:, None] + runs).ravel().astype(np.uint64)
        in_hbm = (blocks[:, None] + offsets).ravel().astype(np.uint64)
        return in_slot, in_hbm


def as_array(copies: Sequence[PageCopy]) -> npt.NDArray[np.int64]:
    return np.array([(c.slot, c.block_in_chunk, c.block_id) for c in copies], dtype=np.int64)


class CpuCopier:
    """Copies by a native thread, layer by layer, beside the model's own computation.

    The last block of a load may receive the request's new tokens, which vLLM writes before it
    waits for the layer, so such blocks are complete in all layers before start_loads returns.
    """

    def __init__(self, addresses: PageAddresses, layouts: Sequence[LayerLayout]) -> None:
        self._addresses = addresses
        self._layouts = layouts
        self._queue = CopyQueue(num_threads=1)
        self._tickets: dict[int, int] = {}
        self._finished: list[int] = []

    def start_loads(self, plans: Sequence[TransferPlan]) -> None:
        assert not self._tickets, "the loads of the last step were not waited for"
        if not plans:
            return
        layers = range(len(self._layouts))
        last = as_array([plan.copies[-1] for plan in plans])
        first = [self._submit(layer, last, load=True) for layer in layers]
        rest = as_array([copy for plan in plans for copy in plan.copies[:-1]])
        if len(rest):
            self._tickets = {layer: self._submit(layer, rest, load=True) for layer in layers}
        for ticket in first:
            self._queue.wait(ticket)
        self._finished += [plan.plan_id for plan in plans]

    def wait_layer(self, layer: int) -> None:
        ticket = self._tickets.pop(layer, None)
        if ticket is not None:
            self._queue.wait(ticket)

    def save(self, plans: Sequence[TransferPlan]) -> None:
        # A step that ran no layer (nothing was scheduled) has still to complete its loads.
        for layer in list(self._tickets):
            self.wait_layer(layer)
        if not plans:
            return
        copies = as_array([copy for plan in plans for copy in plan.copies])
        tickets = [self._submit(i, copies, load=False) for i in range(len(self._layouts))]
        for ticket in tickets:
            self._queue.wait(ticket)
        self._finished += [plan.plan_id for plan in plans]

    def finished(self) -> list[int]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        for layer in list(self._tickets):
            self.wait_layer(layer)

    def _submit(self, layer: int, copies: npt.NDArray[np.int64], *, load: bool) -> int:
        in_slot, in_hbm = self._addresses(layer, copies)
        targets, sources = (in_hbm, in_slot) if load else (in_slot, in_hbm)
        return self._queue.submit(targets, sources, self._layouts[layer].run_bytes)
