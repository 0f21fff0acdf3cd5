# SPDX-License-Identifier: Apache-2.0
"""The memory of moved_memory.py with a CudaEngine, over tests/fake_gpu.py or over a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.engine import Rotation, rotation_numbers
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.rope import Rope
from tests.engine_helpers import new_slots
from tests.fake_gpu import FakeGpu
from tests.unit.transfer.moved_memory import (
    BLOCKS,
    CHUNK_BLOCKS,
    LAYERS,
    SLOTS,
    Layout,
    MovedMemory,
)


class CudaMoved(MovedMemory):
    """Args: gpu: None where it is a real one."""

    def __init__(
        self, gpu: FakeGpu | None, layout: Layout, dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__(layout, dtype, **options)
        if gpu is None:
            self.kv = self.kv.cuda()
        else:
            gpu.hold(self.kv)
        layers = [describe("layer", kv, BLOCKS) for kv in self.kv]
        page_bytes = layers[0].page_bytes
        geometry = Geometry.uniform(
            1, LAYERS, self.block_tokens, page_bytes, CHUNK_BLOCKS * self.block_tokens
        )
        rope = Rope(self.theta, 2 * len(self.theta), self.is_neox)
        name = str(dtype).removeprefix("torch.")
        rotation = Rotation(rope, self.content, self.heads, self.dim, name)
        self.device_slots = new_slots(SLOTS, geometry)
        self.engine = CudaEngine(
            self.device_slots.ctypes.data,
            SLOTS,
            0,
            geometry,
            layers,
            torch.device("cuda", 0),
            0,
            rotations=[rotation],
        )
        used = LAYERS * CHUNK_BLOCKS * page_bytes
        self.device_slots[:, :used] = self.slots[:, :used]  # the engine has tried itself on them
        self.native = self
        assert self.engine.why_not_moved is None
        assert rotation_numbers(rotation, self.block_tokens).items() <= self.arguments.items()

    def load(self, moved: npt.NDArray[np.int64], first_layer: int, stop_layer: int) -> None:
        self.engine.wait(self.engine.move(moved, range(first_layer, stop_layer)))

    def plain(self, kv: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().plain(kv.cpu(), layer)
