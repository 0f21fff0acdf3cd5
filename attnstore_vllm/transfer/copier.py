# SPDX-License-Identifier: Apache-2.0
"""Copies between a worker's HBM and its part of the pool's slots: the device seam.

CpuCopier is for vLLM's CPU build, where HBM is ordinary memory; CudaCopier
(transfer/cuda_copier.py) for CUDA. Both move bytes as vLLM wrote them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from attnstore_vllm._native import PageCopier, omp_team_size
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.plan import TransferPlan, pages

logger = logging.getLogger(__name__)


class Copier(Protocol):
    """One worker's copies. A step calls start_loads, wait_layer for each layer, then save."""

    def start_loads(self, plans: Sequence[TransferPlan]) -> float:
        """Begin to fill blocks from slots; what wait_layer() has returned for is complete.

        Returns: seconds that it has taken for copies.
        """

    def wait_layer(self, layer: int) -> None:
        """Return when this layer of every load begun in this step may be read."""

    def save(self, plans: Sequence[TransferPlan]) -> None:
        """Complete the step's loads, then copy blocks into slots.

        When it returns, the blocks may be given away.
        """

    def finished(self) -> list[int]:
        """Ids of plans completed since the last call; each once."""

    def close(self) -> None:
        """Complete what is in flight."""


class CpuCopier:
    """Copies on the model's own OpenMP threads; what is begun is complete on return.

    The model has all processors, so a thread of our own beside it takes from the model what it
    gives to the copy, and the two together are slower (docs/design.md, "Copies").

    Args:
        slots_base: address of the pool's slot 0 in this process; mapped until close().
        layouts: of the layers, in the order in which slots hold them; the tensors outlive this.
    """

    def __init__(
        self,
        slots_base: int,
        num_slots: int,
        rank: int,
        geometry: Geometry,
        layouts: Sequence[LayerLayout],
    ) -> None:
        shape = layouts[0]
        assert len(layouts) == geometry.num_layers
        assert all(layout.page_bytes == geometry.page_bytes for layout in layouts)
        assert all(layout.block_stride == shape.block_stride for layout in layouts)
        assert all(layout.run_offsets == shape.run_offsets for layout in layouts)
        self._pages = PageCopier(
            slots_base=slots_base + rank * geometry.rank_bytes,
            num_slots=num_slots,
            slot_bytes=geometry.slot_bytes,
            layer_bytes=geometry.layer_bytes,
            page_bytes=geometry.page_bytes,
            layer_bases=[layout.base for layout in layouts],
            num_blocks=shape.num_blocks,
            block_stride=shape.block_stride,
            run_offsets=list(shape.run_offsets),
            run_bytes=shape.run_bytes,
        )
        logger.info("copies between HBM and DRAM run on %d threads", omp_team_size())
        self._loading: list[int] = []
        self._finished: list[int] = []

    def start_loads(self, plans: Sequence[TransferPlan]) -> float:
        assert not self._loading, "the loads of the last step were not completed"
        if not plans:
            return 0.0
        began = time.perf_counter()
        self._pages.load(pages(copy for plan in plans for copy in plan.copies))
        self._loading = [plan.plan_id for plan in plans]
        return time.perf_counter() - began

    def wait_layer(self, layer: int) -> None:
        """All were complete when start_loads returned."""

    def save(self, plans: Sequence[TransferPlan]) -> None:
        self._finished += self._loading
        self._loading = []
        if plans:
            self._pages.save(pages(copy for plan in plans for copy in plan.copies))
            self._finished += [plan.plan_id for plan in plans]

    def finished(self) -> list[int]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self.save(())
