# SPDX-License-Identifier: Apache-2.0
"""Copies between HBM and the page-locked pool on CUDA, with PyTorch's own operators.

Loads run on the model's stream before the forward pass. Saves gather the blocks into a staging
tensor on the model's stream, so that the blocks may be given away at once, and leave it on a
stream of their own; they finish in a later step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import TransferPlan, pages


@dataclass(slots=True)
class _Save:
    """Copies on the save stream. `staging` lives until `done` has fired."""

    plan_ids: list[int]
    staging: list[torch.Tensor]
    done: torch.cuda.Event


class CudaCopier:
    """Implements transfer.copier.Copier.

    Args:
        pool: this process's mapping of all slots, [num_slots, slot_bytes], uint8, CPU. It is
            page-locked here, and stays mapped until close().
        layers: the KV tensors, [num_blocks, ...] as the scheduler counts blocks, in the order in
            which slots hold them.
    """

    def __init__(
        self, pool: torch.Tensor, rank: int, geometry: Geometry, layers: Sequence[torch.Tensor]
    ) -> None:
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(pool.data_ptr(), pool.numel(), 0)
        if int(code) != 0:
            raise ConfigError(
                f"dram: {pool.numel()} bytes of shared memory could not be page-locked (CUDA "
                f"error {int(code)}); raise the limit on locked memory, or ask for less"
            )
        g = geometry
        mine = pool[:, rank * g.rank_bytes : (rank + 1) * g.rank_bytes]
        # [slot, layer, block in the chunk, page bytes]
        self._pages = mine.unflatten(1, (g.num_layers, g.blocks_per_chunk, g.page_bytes))
        self._pool = pool
        self._layers = layers
        self._page_bytes = g.page_bytes
        self._stream = torch.cuda.Stream()
        self._saves: list[_Save] = []
        self._finished: list[int] = []

    def start_loads(self, plans: Sequence[TransferPlan]) -> float:
        if plans:  # what the step before still computes is no part of these copies
            torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        for plan in plans:
            copies = pages(plan.copies)
            ids = torch.from_numpy(copies[:, 2].copy()).to(self._layers[0].device)
            for layer, kv in enumerate(self._layers):
                source = [self._pages[slot, layer, block] for slot, block, _ in copies]
                staging = torch.empty(
                    (len(source), self._page_bytes), dtype=torch.uint8, device=kv.device
                )
                for row, page in enumerate(source):
                    staging[row].copy_(page, non_blocking=True)
                kv[ids] = staging.view(kv.dtype).view(len(source), *kv.shape[1:])
        if plans:
            # The slots are released when the plans are reported, so the copies must be over.
            torch.cuda.current_stream().synchronize()
        self._finished += [plan.plan_id for plan in plans]
        return time.perf_counter() - began

    def wait_layer(self, layer: int) -> None:
        """Loads were ordered before the forward pass by the stream."""

    def save(self, plans: Sequence[TransferPlan]) -> None:
        if not plans:
            return
        copies = pages(copy for plan in plans for copy in plan.copies)
        ids = torch.from_numpy(copies[:, 2].copy()).to(self._layers[0].device)
        staging = [
            kv[ids].reshape(len(copies), -1).view(torch.uint8) for kv in self._layers
        ]  # on the model's stream: what writes these blocks next comes after it
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layer, gathered in enumerate(staging):
                for row, (slot, block, _) in enumerate(copies):
                    self._pages[slot, layer, block].copy_(gathered[row], non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._saves.append(_Save([plan.plan_id for plan in plans], staging, done))

    def finished(self) -> list[int]:
        while self._saves and self._saves[0].done.query():
            self._finished += self._saves.pop(0).plan_ids
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self._stream.synchronize()
        self._saves.clear()
        torch.cuda.cudart().cudaHostUnregister(self._pool.data_ptr())
