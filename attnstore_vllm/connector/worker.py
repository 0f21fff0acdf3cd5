# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies what the plan says, and says what is copied. Decides nothing."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any

import torch

from attnstore_vllm.connector.messages import StepPlan, StepReport
from attnstore_vllm.connector.metrics import AttnStoreStats
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.copier import Copier, CpuCopier
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout, describe
from attnstore_vllm.transfer.pool import SLOTS_AT, SharedPool
from attnstore_vllm.types import Flow


class Worker:
    """One rank.

    Args:
        pool: this process's mapping; closed with the worker.
        layers: names of the layers in the order in which slots hold them.
    """

    def __init__(
        self,
        pool: SharedPool,
        rank: int,
        geometry: Geometry,
        layers: list[str],
        num_blocks: int,
    ) -> None:
        self._pool = pool
        self._rank = rank
        self._geometry = geometry
        self._layers = {name: i for i, name in enumerate(layers)}
        self._num_blocks = num_blocks
        self._copier: Copier | None = None
        self._stats = AttnStoreStats.empty()
        self._sending: list[str] = []
        self._step = 0
        self._load_wait_s = 0.0
        self._load_started = 0.0

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor], kernel: str) -> None:
        """Take the KV tensors, and tell the scheduler side what they look like.

        Args:
            kernel: names whatever else decides the order of bytes within a page.
        """
        missing = self._layers.keys() - kv_caches.keys()
        if missing:
            raise UnsupportedError(f"vLLM registered no KV tensor for the layers {sorted(missing)}")
        tensors = [kv_caches[name] for name in self._layers]
        layouts = [
            describe(name, tensor, self._num_blocks)
            for name, tensor in zip(self._layers, tensors, strict=True)
        ]
        if any(layout.page_bytes != self._geometry.page_bytes for layout in layouts):
            raise UnsupportedError(
                f"pages have {sorted({x.page_bytes for x in layouts})} bytes, but vLLM's cache "
                f"configuration says {self._geometry.page_bytes}; this layout is not known"
            )
        self._copier = self._make_copier(tensors, layouts)
        shape = layouts[0]
        self._pool.publish(
            self._rank,
            {
                "device": tensors[0].device.type,
                "dtype": str(tensors[0].dtype),
                "shape": list(tensors[0].shape[1:]),
                "run_bytes": shape.run_bytes,
                "run_order": [offset > 0 for offset in shape.run_offsets],
                "kernel": kernel,
            },
        )

    def _make_copier(self, tensors: list[torch.Tensor], layouts: list[LayerLayout]) -> Copier:
        if tensors[0].device.type == "cuda":
            from attnstore_vllm.transfer.cuda_copier import CudaCopier  # noqa: PLC0415

            slots = torch.frombuffer(self._pool.buffer, dtype=torch.uint8)[SLOTS_AT:]
            shape = (self._pool.num_slots, self._pool.slot_bytes)
            blocks = [kv.unflatten(0, (self._num_blocks, -1)) for kv in tensors]
            return CudaCopier(slots.view(shape), self._rank, self._geometry, blocks)
        if tensors[0].device.type != "cpu":
            raise UnsupportedError(f"AttnStore does not know the device {tensors[0].device}")
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._pool.buffer)) + SLOTS_AT
        return CpuCopier(base, self._pool.num_slots, self._rank, self._geometry, layouts)

    @property
    def copier(self) -> Copier:
        assert self._copier is not None, "register_kv_caches comes before the first step"
        return self._copier

    def start_load(self, plan: StepPlan) -> None:
        self._step = plan.number  # here, since vLLM may ask for the report before the saves
        if plan.loads:
            self._load_started = time.perf_counter()
            self._load_wait_s = self.copier.start_loads(plan.loads)
            self._count(Flow.LOAD, plan.loads)

    def wait_for_layer(self, layer: str) -> None:
        index = self._layers.get(layer)
        if index is None:
            return
        began = time.perf_counter()
        self.copier.wait_layer(index)
        if not self._load_started:
            return
        now = time.perf_counter()
        self._load_wait_s += now - began
        if index == len(self._layers) - 1:
            self._stats.observe("load_seconds", now - self._load_started)
            self._stats.observe("load_wait_seconds", self._load_wait_s)
            self._load_started = 0.0

    def save(self, plan: StepPlan) -> None:
        """After the forward pass. Completes the step's loads in any case."""
        self.copier.save(plan.saves)
        self._load_started = 0.0
        self._count(Flow.SAVE, plan.saves)
        self._sending += plan.finished_saving

    def take_finished_sending(self) -> set[str]:
        sending, self._sending = self._sending, []
        return set(sending)

    def take_report(self) -> StepReport:
        wait_s, self._load_wait_s = self._load_wait_s, 0.0
        return StepReport(self._step, self.copier.finished(), wait_s)

    def take_stats(self) -> AttnStoreStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, AttnStoreStats.empty()
        return stats

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._pool.close()

    def _count(self, flow: Flow, plans: list[Any]) -> None:
        num_blocks = sum(plan.num_blocks for plan in plans)
        num_bytes = num_blocks * self._geometry.page_bytes * self._geometry.num_layers
        self._stats.add("bytes", flow.value, num_bytes)
