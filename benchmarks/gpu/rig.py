# SPDX-License-Identifier: Apache-2.0
"""KV tensors in HBM, a pool beside them, a CudaEngine between them, and rows of a table."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.cuda_read_buffer import ReadSize
from attnstore_vllm.transfer.engine import Pages, Rotation
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import ContentMap, ContentSide
from attnstore_vllm.transfer.rope import Rope

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class KvShape:
    """Of one rank."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int = 128

    @property
    def page_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * BLOCK_TOKENS * BF16_BYTES


LLAMA_8B = KvShape("Llama-8B", 32, 8)
LLAMA_70B_TP4 = KvShape("Llama-70B/TP4", 80, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `goal` is None where nothing is to be reached, `value` where it could
    not be measured."""

    what: str
    how: str
    value: float | None
    goal: float | None = None
    at_most: bool = False
    detail: str = ""
    is_wrong: bool = False
    """Bytes were not what they should be."""

    @property
    def is_met(self) -> bool | None:
        if self.goal is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def cells(self) -> list[str]:
        bound = "" if self.goal is None else f"{'<=' if self.at_most else '>='} {self.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[self.is_met]
        value = "-" if self.value is None else f"{self.value:.3f}"
        return [self.what, self.how, value, bound, met, self.detail]

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what, "how": self.how, "value": self.value, "goal": self.goal,
            "goal_is": "at most" if self.at_most else "at least", "is_met": self.is_met,
            "is_wrong": self.is_wrong, "detail": self.detail,
        }  # fmt: skip


class KvRig:
    """`num_tokens` of history: as many blocks, scattered among twice as many, and whole chunks in
    slots that follow each other.

    Args:
        shape: KV is [blocks, 2, tokens, heads, dim] of bf16, one tensor a layer.
        num_rows: of the write buffer.
        moves: the engine is told how K is rotated.
        is_encoded: slots keep pages encoded; KV is random, else it is zero.
        read_size: of the read buffer; None: as the engine's rules say.
    """

    def __init__(
        self,
        shape: KvShape,
        num_tokens: int,
        num_rows: int,
        seed: int = 1,
        moves: bool = False,
        is_encoded: bool = False,
        read_size: ReadSize | None = None,
    ) -> None:
        assert num_tokens % CHUNK_TOKENS == 0
        self.shape = shape
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.num_blocks = 2 * num_tokens // BLOCK_TOKENS
        self.geometry = replace(
            Geometry.uniform(1, shape.layers, BLOCK_TOKENS, shape.page_bytes, CHUNK_TOKENS),
            is_encoded=is_encoded,
        )
        self.num_slots = num_tokens // CHUNK_TOKENS
        self._memory = mmap.mmap(-1, self.num_slots * self.geometry.slot_bytes)
        self.slots: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        size = (self.num_blocks, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        self.kv = [
            torch.zeros(size, dtype=torch.bfloat16, device=self.device) for _ in range(shape.layers)
        ]
        layouts = [describe(f"layer {i}", kv, self.num_blocks) for i, kv in enumerate(self.kv)]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.engine = CudaEngine(
            address,
            self.num_slots,
            0,
            self.geometry,
            layouts,
            self.device,
            num_rows,
            rotations=[_rotation(shape)] if moves else [],
            read_size=read_size,
        )
        self.rules = self.engine.rules
        """What it does if it is not told otherwise."""
        for kv in self.kv if is_encoded else ():
            kv.normal_()
        ids = np.random.default_rng(seed).permutation(self.num_blocks)
        places = np.arange(num_tokens // BLOCK_TOKENS)
        per_chunk = self.geometry.blocks_per_chunk
        self.pages: Pages = np.stack(
            [places // per_chunk, places % per_chunk, ids[: len(places)]], axis=1
        ).astype(np.int64)
        self.free_blocks: npt.NDArray[np.int64] = ids[len(places) :]
        self.layers = range(shape.layers)

    @property
    def num_bytes(self) -> int:
        """Of all pages, all layers, as the tensors have them."""
        return len(self.pages) * self.shape.page_bytes * self.shape.layers

    def pool(self) -> torch.Tensor:
        """The slots as one flat tensor, page-locked as they are."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def close(self) -> None:
        """The memory goes when nothing looks at it any more."""
        self.engine.close()
        self.kv.clear()
        torch.cuda.empty_cache()


def _rotation(shape: KvShape) -> Rotation:
    """Llama's, of the pages of KvRig."""
    dim, pairs = shape.head_dim, shape.head_dim // 2
    row = shape.kv_heads * dim
    key, value = (
        ContentSide(base, dim, BLOCK_TOKENS, 0, row, dim, 0, 1) for base in (0, BLOCK_TOKENS * row)
    )
    theta = 500_000.0 ** (-np.arange(pairs) / pairs)
    return Rotation(Rope(theta, dim, True), ContentMap(key, value), shape.kv_heads, dim, "bfloat16")


def seconds(work: Callable[[], object]) -> float:
    """By the host's clock, from an idle device to an idle device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def begin_seconds(work: Callable[[], object]) -> float:
    """How long the calling thread is busy with it, on an idle device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took


def in_turn(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each, all measured by turns, after one round that does not count."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, found in zip(works, times, strict=True):
            took = seconds(work)
            if number:
                found.append(took)
    return [statistics.median(found) for found in times]
