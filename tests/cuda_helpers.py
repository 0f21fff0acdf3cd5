# SPDX-License-Identifier: Apache-2.0
"""A CudaEngine over tests/fake_gpu.py or over a GPU, and a caller that keeps its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attnstore_vllm.transfer import (
    cuda_cells,
    cuda_engine,
    cuda_events,
    cuda_read_buffer,
    cuda_tables,
)
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.cuda_methods import RULES, Method, Rules, only
from attnstore_vllm.transfer.cuda_read_buffer import ReadSize
from attnstore_vllm.transfer.engine import Rotation
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import probe
from attnstore_vllm.transfer.plan import Moved
from attnstore_vllm.transfer.rope import Rope
from tests.engine_helpers import (
    ALL,
    BLOCK_TOKENS,
    BLOCKS,
    CONTENT,
    HEADS,
    LAYERS,
    ORDERS,
    PAGE_BYTES,
    ROWS,
    SLOTS,
    WITHIN,
    Bytes,
    Rig,
    table,
)
from tests.fake_driver import native_module
from tests.fake_gpu import FakeGpu

METHODS = {
    "kernel": only(Method.KERNEL), "dma": only(Method.DMA), "buffer": only(Method.BUFFER),
    "rules": RULES,
}  # fmt: skip
READ_SIZE = ReadSize(2, 2 * PAGE_BYTES)
"""Two spans of two pages each, so that loads go round."""


class CudaRig(Rig):
    """A Rig with a CudaEngine; `gpu` is None where it is a real one.

    Args:
        moves: it has a rotation, of bf16; bytes are exact where nothing turns, at a shift of 0.
    """

    def __init__(
        self, gpu: FakeGpu | None, order: tuple[int, ...] = ORDERS[2], num_rows: int = ROWS,
        rules: Rules = RULES, num_ranks: int = 1, rank: int = 0, moves: bool = False,
        borders: Sequence[int] = (), read_size: ReadSize | None = READ_SIZE,
    ) -> None:  # fmt: skip
        super().__init__(order, None, num_ranks=num_ranks, rank=rank)
        self.gpu = gpu
        if gpu is None:
            self.tensors = [stored.cuda() for stored in self.tensors]
            self.layers = [
                stored.permute([order.index(axis) for axis in range(4)]) for stored in self.tensors
            ]
        else:
            gpu.hold(*self.tensors)
        layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(self.layers)]
        self.cuda = CudaEngine(
            self.slots.ctypes.data, SLOTS, rank, self.geometry, layouts,
            torch.device("cuda", 0), num_rows, rules, [rotation_of(order)] if moves else [],
            borders, read_size,
        )  # fmt: skip
        self.engine = self.cuda
        sides = rotation_of(order).content
        places = [
            side.places(BLOCK_TOKENS, HEADS, CONTENT // 2).reshape(BLOCK_TOKENS, -1)
            for side in (sides.key, sides.value)
        ]
        self.token_places = np.concatenate(places, axis=1)
        """[tokens, elements]: where K and V of each token are in its page."""

    def hbm(self) -> Bytes:
        if self.gpu is None:
            torch.cuda.synchronize()
        blocks = [stored.movedim(self._block_axis, 0).cpu().numpy() for stored in self.tensors]
        return np.stack([b.reshape(BLOCKS, -1).view(np.uint8) for b in blocks])

    def compute(self, work: Callable[[], object]) -> None:
        """Give the model's stream something to do."""
        if self.gpu is None:
            work()
        else:
            self.gpu.model.run(work)

    def settle(self) -> None:
        if self.gpu is None:
            torch.cuda.synchronize()
        else:
            self.gpu.synchronize()


Opens = Callable[..., CudaRig]


def rigs(gpu: FakeGpu | None, **always: Any) -> Iterator[Opens]:
    """The body of a fixture: open_rig(*arguments of CudaRig), closed when the test ends."""
    opened: list[CudaRig] = []

    def open_rig(*arguments: Any, **options: Any) -> CudaRig:
        opened.append(CudaRig(gpu, *arguments, **{**options, **always}))
        assert opened[-1].cuda.why_not_moved is None
        return opened[-1]

    yield open_rig
    for rig in opened:
        rig.engine.close()


def rotation_of(order: tuple[int, ...]) -> Rotation:
    """Of a Rig's KV: one pair of three dims turns."""
    head_dim = CONTENT // 2

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        cache[0] = torch.cat((key, value), dim=2).transpose(0, 1)

    sizes = (1, HEADS, BLOCK_TOKENS, CONTENT)
    stored = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16)
    cache = stored.permute([order.index(axis) for axis in range(4)])
    content = probe(write, cache, 1, block_tokens=BLOCK_TOKENS, num_heads=HEADS, head_dim=head_dim)
    return Rotation(Rope(np.array([0.5]), 2, True), content, HEADS, head_dim, "bfloat16")


def moves(*runs: tuple[int, int, int, int, int, int]) -> Moved:
    """Slot, first token in the chunk, tokens, block id, first token in the block, shift."""
    return np.array(runs, np.int64).reshape(-1, 6)


def install(monkeypatch: pytest.MonkeyPatch, seed: int = 3) -> FakeGpu:
    """From here on CudaEngine is over a fake."""
    gpu = FakeGpu(seed)
    for module in (cuda_cells, cuda_engine, cuda_events, cuda_read_buffer, cuda_tables):
        monkeypatch.setattr(module, "torch", gpu.torch())
    monkeypatch.setattr(cuda_engine, "native_module", native_module)
    return gpu


class Story:
    """A caller that keeps the rules at random, beside what must come of it: program order.

    Rows, slots and blocks are used again as soon as the rules allow it; nothing else is waited for.
    """

    def __init__(self, rig: CudaRig, seed: int) -> None:
        self.rig, self.random = rig, Random(seed)
        self.hbm, self.slots = rig.hbm(), rig.pages.copy()
        self.rows = list(range(ROWS))
        self.busy_slots: dict[int, list[Any]] = {}
        self.leaving: list[tuple[Any, list[int]]] = []
        self.loading: list[tuple[Any, list[int]]] = []
        self.seen: list[tuple[torch.Tensor, Bytes]] = []

    def run(self, steps: int) -> None:
        acts = [self.compute, self.save, self.load, self.read, self.poll]
        if self.rig.cuda.token_movers:
            acts += [self.move, self.move]
        for _ in range(steps):
            self.random.choice(acts)()
        self.rig.settle()
        assert np.array_equal(self.rig.hbm(), self.hbm)
        assert np.array_equal(self.rig.pages, self.slots)
        for found, wanted in self.seen:
            assert np.array_equal(found.cpu().numpy(), wanted)

    def compute(self) -> None:
        """The model may write to a block whose load it has waited for."""
        block = self.random.randrange(BLOCKS)
        self.wait_for([block])
        self.rig.compute(lambda: self.rig.overwrite(block))
        self.hbm[:, block] = (self.hbm[:, block].view(np.int16) + 1).view(np.uint8)

    def read(self) -> None:
        block, layer = self.random.randrange(BLOCKS), self.random.randrange(LAYERS)
        self.wait_for([block])
        kv = self.rig.tensors[layer]
        found = torch.zeros_like(kv.movedim(self.rig._block_axis, 0)[block])
        self.rig.compute(lambda: found.copy_(kv.movedim(self.rig._block_axis, 0)[block]))
        wanted = self.hbm[layer, block].view(np.int16).reshape(tuple(found.shape)).copy()
        self.seen.append((found, wanted))

    def wait_for(self, blocks: list[int]) -> None:
        for event, loading in self.loading:
            if set(blocks) & set(loading):
                self.rig.engine.model_waits(event)

    def save(self) -> None:
        slots = self.free_slots(2)
        if len(self.rows) < len(slots) or not slots:
            return
        blocks = self.random.sample(range(BLOCKS), len(slots))
        self.wait_for(blocks)
        pages = table(
            *(
                (slot, self.random.randrange(WITHIN), block)
                for slot, block in zip(slots, blocks, strict=True)
            )
        )
        rows = [self.rows.pop(self.random.randrange(len(self.rows))) for _ in slots]
        by_layer = self.random.random() < 0.5
        parts = [range(i, i + 1) for i in ALL] if by_layer else [ALL]
        for part in parts:
            self.rig.engine.gather(pages, np.array(rows), part)
        events = [self.rig.engine.drain(pages, np.array(rows), part) for part in parts]
        self.leaving.append((events[-1], rows))
        for slot, within, block in pages:
            self.busy_slots[int(slot)] = [events[-1]]
            self.slots[slot, :, within] = self.hbm[:, block]

    def load(self) -> None:
        slots = self.free_slots(3)
        blocks = self.random.sample(range(BLOCKS), len(slots))
        if not slots:
            return
        pages = table(
            *(
                (slot, self.random.randrange(WITHIN), block)
                for slot, block in zip(slots, blocks, strict=True)
            )
        )
        by_layer = self.random.random() < 0.5
        parts = [range(i, i + 1) for i in ALL] if by_layer else [ALL]
        events = [self.rig.engine.load(pages, part) for part in parts]
        self.loading.append((events[-1], blocks))
        for slot, within, block in pages:
            self.busy_slots[int(slot)] = [events[-1]]
            self.hbm[:, block] = self.slots[slot, :, within]

    def move(self) -> None:
        """Tokens go where others are, of a block that stays; nothing turns."""
        slots = self.free_slots(3)
        if not slots:
            return
        blocks = self.random.sample(range(BLOCKS), len(slots))
        runs = []
        for slot, block in zip(slots, blocks, strict=True):
            within = self.random.randrange(BLOCK_TOKENS)
            count = self.random.randint(1, BLOCK_TOKENS - within)
            first = self.random.randint(0, WITHIN * BLOCK_TOKENS - count)
            runs.append((slot, first, count, block, within, 0))
        event = self.rig.engine.move(moves(*runs), ALL)
        self.loading.append((event, blocks))
        for slot, first, count, block, within, _ in runs:
            self.busy_slots[slot] = [event]
            move_expected(self.rig, self.slots, self.hbm, (slot, first, count, block, within))

    def free_slots(self, most: int) -> list[int]:
        free = [
            slot
            for slot in range(SLOTS)
            if all(event.done() for event in self.busy_slots.get(slot, []))
        ]
        return self.random.sample(free, min(len(free), self.random.randint(1, most)))

    def poll(self) -> None:
        """Time passes."""
        if self.rig.gpu is not None:
            for _ in range(self.random.randrange(40)):
                self.rig.gpu.step()
        for event, rows in [one for one in self.leaving if one[0].done()]:
            self.rows += rows
            self.leaving.remove((event, rows))


def move_expected(
    rig: CudaRig, slots: Bytes, hbm: Bytes, run: tuple[int, int, int, int, int]
) -> None:
    """Does to these copies of a rig's pages and blocks what a move without a shift does."""
    slot, first, count, block, within = run
    for layer in ALL:
        target = hbm[layer, block].view(np.int16)
        for i in range(count):
            page, token = divmod(first + i, BLOCK_TOKENS)
            source = slots[slot, layer, page].view(np.int16)
            target[rig.token_places[within + i]] = source[rig.token_places[token]]
