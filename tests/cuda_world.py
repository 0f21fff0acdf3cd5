# SPDX-License-Identifier: Apache-2.0
"""Ranks with a CudaEngine each over the fake GPU, drawn by a seed: vLLM's layouts, types, blocks of
several kernel blocks, layers of two kinds; and what must be in HBM and in the slots."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.transfer import (
    cuda_cells,
    cuda_engine,
    cuda_events,
    cuda_read_buffer,
    cuda_tables,
)
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.cuda_methods import Copy, Method, ReadOrder, Rule, Rules
from attnstore_vllm.transfer.cuda_read_buffer import NO_SPANS, ReadSize
from attnstore_vllm.transfer.cuda_tables import TableRing
from attnstore_vllm.transfer.encoded import DecodedChunk
from attnstore_vllm.transfer.engine import Rotation, page_copier
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import LayerLayout, describe
from attnstore_vllm.transfer.page_content import probe
from attnstore_vllm.transfer.rope import Rope
from tests.engine_helpers import Bytes, new_slots, table
from tests.fake_driver import native_module
from tests.fake_gpu import FakeGpu

LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4),
    "N outermost": (3, 0, 1, 2, 4), "C before N": (0, 1, 2, 4, 3),
}  # fmt: skip
"""Those of vLLM's KVCacheLayout, and two that are none: [layer, block, head, token, content]."""
TYPES = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}
"""As wide as fp8, bf16 and float32."""
ONE = 0x3F80
"""As the bits of bfloat16."""
ROTATED = {torch.int16: torch.bfloat16, torch.int32: torch.float32}


@dataclass(frozen=True)
class KvKind:
    """Layers that are cut alike: one tensor."""

    layout: str
    dtype: torch.dtype
    layers: int
    heads: int
    content: int
    kernel_tokens: int
    """Of a kernel's block."""

    @property
    def block_bytes(self) -> int:
        """Of a kernel's block."""
        item = np.dtype(TYPES[self.dtype]).itemsize
        return self.heads * self.kernel_tokens * self.content * item

    def tensor(self, blocks: int, *, is_encoded: bool = False) -> torch.Tensor:
        """[layers, kernel's blocks, heads, tokens, content], random: what is encoded is bfloat16
        from 1 to 2, of which a page always fits in its cell."""
        order = LAYOUTS[self.layout]
        sizes = (self.layers, blocks, self.heads, self.kernel_tokens, self.content)
        info = torch.iinfo(self.dtype)
        first, last = (ONE, ONE + 128) if is_encoded else (info.min, info.max)
        stored = torch.randint(first, last, [sizes[axis] for axis in order])
        return stored.to(self.dtype).permute([order.index(axis) for axis in range(5)])


@dataclass(frozen=True)
class Shape:
    """All that a story is drawn about."""

    kinds: tuple[KvKind, ...]
    kernel_blocks: int
    """Of one block of the scheduler."""
    blocks: int
    within: int
    """Blocks of a chunk."""
    slots: int
    rows: int
    ranks: int
    moves: bool
    ring_words: int | None
    read_size: ReadSize = NO_SPANS
    is_encoded: bool = False

    @property
    def layers(self) -> int:
        return sum(kind.layers for kind in self.kinds)

    @property
    def block_tokens(self) -> int:
        return self.kernel_blocks * self.kinds[0].kernel_tokens


def draw_shape(random: Random) -> Shape:
    kernel_tokens = random.choice([1, 2, 4, 8])
    kinds = [
        KvKind(
            random.choice(list(LAYOUTS)), random.choice(list(TYPES)), random.randint(1, 3),
            random.choice([1, 2, 3]), 2 * random.choice([1, 3, 4, 8, 16]), kernel_tokens,
        )
        for _ in range(random.choice([1, 1, 1, 2]))
    ]  # fmt: skip
    moves = len(kinds) == 1 and kinds[0].dtype in ROTATED and kinds[0].content >= 4
    kernel_blocks = random.choice([1, 1, 2, 4])
    is_encoded = all(kind.dtype is torch.int16 for kind in kinds) and random.random() < 0.5
    return Shape(
        tuple(kinds),
        kernel_blocks,
        blocks=random.randint(8, 24),
        within=random.randint(1, 4),
        slots=random.randint(5, 8),
        rows=random.randint(2, 8),
        ranks=random.choice([1, 1, 1, 2, 2, 3, 4, 8]),
        moves=moves and random.random() < 0.7,
        ring_words=random.choice([None, 400, 700] if moves else [None, 8, 20]),
        read_size=draw_read_size(random, [kernel_blocks * kind.block_bytes for kind in kinds]),
        is_encoded=is_encoded,
    )


def draw_read_size(random: Random, pages: list[int]) -> ReadSize:
    """Few spans, of a few pages; of the larger of two kinds, often of none."""
    if random.random() < 0.4:
        return NO_SPANS
    words = -(-random.randint(1, 3) * random.choice(pages) // 16)
    return ReadSize(random.randint(1, 3), 16 * words)


def draw_rules(random: Random) -> Rules:
    """Also what nobody would choose: a gather by DMA."""
    found = {}
    for copy in Copy:
        first, last = random.choice(list(Method)), random.choice(list(Method))
        limit = random.choice([1, 32, 256])
        found[copy] = (
            Rule(limit, first, random.randint(1, 4), random.choice(list(ReadOrder))),
            Rule(0, last, random.randint(1, 4), random.choice(list(ReadOrder))),
        )
    return found


def rotation_of(shape: Shape) -> Rotation:
    kind, tokens = shape.kinds[0], shape.block_tokens
    head_dim, blocks = kind.content // 2, shape.kernel_blocks

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        both = torch.cat((key, value), dim=2).transpose(0, 1)  # [heads, tokens, content]
        cache[:blocks] = both.unflatten(1, (blocks, -1)).transpose(0, 1)

    order = LAYOUTS[kind.layout]
    sizes = (1, blocks, kind.heads, kind.kernel_tokens, kind.content)
    stored = torch.zeros([sizes[axis] for axis in order], dtype=ROTATED[kind.dtype])
    cache = stored.permute([order.index(axis) for axis in range(5)])[0]
    content = probe(write, cache, 1, block_tokens=tokens, num_heads=kind.heads, head_dim=head_dim)
    name = str(ROTATED[kind.dtype]).removeprefix("torch.")
    return Rotation(Rope(np.array([0.5]), 2, True), content, kind.heads, head_dim, name)


@contextmanager
def installed(gpu: FakeGpu) -> Iterator[None]:
    """CudaEngine is over the fake."""
    with ExitStack() as undo:
        stand_in = gpu.torch()
        for module in (cuda_cells, cuda_engine, cuda_events, cuda_read_buffer, cuda_tables):
            undo.enter_context(mock.patch.object(module, "torch", stand_in))
        undo.enter_context(mock.patch.object(cuda_engine, "native_module", native_module))
        yield


class Rank:
    """One rank: its HBM, its engine, and beside them what must be in its blocks and slots."""

    def __init__(self, gpu: FakeGpu, shape: Shape, rank: int, slots: Bytes, random: Random) -> None:
        self.gpu, self.shape, self.rank = gpu, shape, rank
        self.enter()
        self.kv = [
            kind.tensor(shape.blocks * shape.kernel_blocks, is_encoded=shape.is_encoded)
            for kind in shape.kinds
        ]
        gpu.hold(*self.kv)
        layers = [layer for kv in self.kv for layer in kv]
        layouts = [describe(f"layer {i}", kv, shape.blocks) for i, kv in enumerate(layers)]
        self.blocks = [self._by_address(kv) for kv in layers]
        """Of each layer, [blocks, ...] in the order of addresses: the tensors themselves."""
        self.geometry = geometry_of(shape, layouts)
        rotations = [rotation_of(shape)] if shape.moves else []
        self.engine = CudaEngine(
            slots.ctypes.data,
            shape.slots,
            rank,
            self.geometry,
            layouts,
            torch.device("cuda", 0),
            shape.rows,
            draw_rules(random),
            rotations,
            read_size=shape.read_size,
        )
        assert self.engine.why_not_moved is None
        if shape.ring_words is not None:
            device = torch.device("cuda", 0)
            tables: Any = self.engine._tables
            for name in (Copy.LOAD, Copy.SAVE, Copy.GATHER):
                tables[name] = TableRing(device, shape.ring_words)
            tables[Copy.DRAIN] = tables[Copy.SAVE]
        part = slots[:, self.geometry.part_at(rank) :]
        self.pages = []
        """Of each layer, [slots, blocks of the chunk, bytes of a page or its cell]: the slots
        themselves."""
        for layer, cell_bytes in enumerate(self.geometry.cells):
            region = part[:, self.geometry.region_at(layer) :][:, : shape.within * cell_bytes]
            self.pages.append(region.reshape(shape.slots, shape.within, cell_bytes))
            assert np.shares_memory(self.pages[-1], slots)
        self.places = token_places(shape, rotations)
        self.hbm = [self.read(layer) for layer in range(shape.layers)]
        sizes = (shape.slots, shape.within)
        self.in_slots: list[Bytes] = [
            np.zeros((*sizes, r), np.uint8) for r in self.geometry.regions
        ]
        if shape.is_encoded:
            self.chunk = DecodedChunk(self.geometry)
            into = self.chunk.layouts()
            self.codes = page_copier(slots.ctypes.data, shape.slots, rank, self.geometry, into)
            for slot in range(shape.slots):
                for block in range(shape.within):
                    self.put_in_slot(slot, block, block)

    def enter(self) -> None:
        self.gpu.use(self.rank)

    def _by_address(self, kv: torch.Tensor) -> torch.Tensor:
        by_block = kv.unflatten(0, (self.shape.blocks, self.shape.kernel_blocks))
        inner = sorted(range(1, by_block.dim()), key=lambda axis: -by_block.stride(axis))
        return by_block.permute([0, *inner])

    def read(self, layer: int) -> Bytes:
        """[blocks, page bytes]: a copy."""
        return self.blocks[layer].contiguous().flatten(1).view(torch.uint8).numpy().copy()

    def put(self, layer: int, block: int, value: int) -> None:
        """As the model does with a block that is its own; on its stream."""
        self.blocks[layer][block] = self._number(value)

    def expect(self, layer: int, block: int, value: int) -> None:
        self.hbm[layer][block].view(self._numbers(layer))[:] = self._number(value)

    def _number(self, value: int) -> int:
        return ONE + value if self.shape.is_encoded else value

    def put_in_slot(self, slot: int, block: int, value: int) -> None:
        """As another program would, and what is expected: of all layers."""
        for layer, in_slots in enumerate(self.in_slots):
            in_slots[slot, block].view(self._numbers(layer))[:] = self._number(value)
            if not self.shape.is_encoded:
                self.pages[layer][slot, block] = in_slots[slot, block]
        if self.shape.is_encoded:
            self._encode(slot, [block])

    def _encode(self, slot: int, blocks: list[int]) -> None:
        """What is expected of these blocks, into the slot."""
        for layer, layout in enumerate(self.chunk.layouts()):
            for block in blocks:
                page = self.in_slots[layer][slot, block]
                ctypes.memmove(
                    layout.base + block * layout.block_stride, page.ctypes.data, page.size
                )
        pages = table(*((slot, block, block) for block in blocks))
        assert not self.codes.save(pages, 0, self.shape.layers)

    def _numbers(self, layer: int) -> Any:
        return TYPES[self.blocks[layer].dtype]

    def expect_move(self, run: tuple[int, int, int, int, int]) -> None:
        slot, first, count, block, within = run
        for layer in range(self.shape.layers):
            numbers = self._numbers(layer)
            target = self.hbm[layer][block].view(numbers)
            for i in range(count):
                page, token = divmod(first + i, self.shape.block_tokens)
                source = self.in_slots[layer][slot, page].view(numbers)
                target[self.places[within + i]] = source[self.places[token]]

    def wrong(self) -> list[str]:
        """What is not as it must be, when all is over."""
        found = []
        for layer in range(self.shape.layers):
            if not np.array_equal(self.read(layer), self.hbm[layer]):
                found.append(f"rank {self.rank}, layer {layer}: HBM")
        cells = [pages.copy() for pages in self.pages]
        if self.shape.is_encoded:  # the same pages have the same bytes
            for slot in range(self.shape.slots):
                self._encode(slot, list(range(self.shape.within)))
        wanted = self.pages if self.shape.is_encoded else self.in_slots
        for layer, (had, want) in enumerate(zip(cells, wanted, strict=True)):
            if not np.array_equal(had, want):
                found.append(f"rank {self.rank}, layer {layer}: slots")
        return found


def token_places(shape: Shape, rotations: list[Rotation]) -> npt.NDArray[np.int64]:
    """[tokens, elements]: where K and V of each token are in its page."""
    kind = shape.kinds[0]
    places = [
        side.places(shape.block_tokens, kind.heads, kind.content // 2).reshape(
            shape.block_tokens, -1
        )
        for rotation in rotations
        for side in (rotation.content.key, rotation.content.value)
    ]
    return np.concatenate(places, axis=1) if places else np.empty((0, 0), np.int64)


def geometry_of(shape: Shape, layouts: list[LayerLayout]) -> Geometry:
    regions = tuple(layout.page_bytes for layout in layouts)
    group = Group(shape.block_tokens, tuple(f"layer {i}" for i in range(shape.layers)))
    return Geometry(
        shape.ranks,
        regions,
        (group,),
        shape.within * shape.block_tokens,
        is_encoded=shape.is_encoded,
    )


def make_ranks(gpu: FakeGpu, shape: Shape, random: Random) -> tuple[Bytes, list[Rank]]:
    """The slots, and the ranks that share them."""
    kinds = [kind.tensor(shape.blocks * shape.kernel_blocks) for kind in shape.kinds]
    layouts = [describe("layer", layer, shape.blocks) for kv in kinds for layer in kv]
    slots = new_slots(shape.slots, geometry_of(shape, layouts))
    return slots, [Rank(gpu, shape, rank, slots, random) for rank in range(shape.ranks)]
