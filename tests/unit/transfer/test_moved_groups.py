# SPDX-License-Identifier: Apache-2.0
"""Tokens moved in two KV cache groups that lie over each other: each in its own layers, blocks and
rotation, and what a moved hit is planned as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.open_plans import plan_groups
from attnstore_vllm.transfer import cuda_engine
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.engine import CopyEngine, CpuEngine, Rotation, rotation_numbers
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import ContentMap, probe
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, MovedRun
from attnstore_vllm.transfer.rope import NO_ROPE, Rope
from attnstore_vllm.transfer.worker_copies import Loads
from tests.cuda_helpers import install
from tests.engine_helpers import new_slots
from tests.fake_gpu import FakeGpu
from tests.helpers import name_of, sequence_of

DIM, BLOCKS, SLOTS, CHUNK = 8, 9, 4, 64
SHAPES = ((32, 1), (16, 2), (16, 2))
"""Tokens of a block and heads of each group: pages of one size."""
LAYERS = (2, 3, 1)
GEOMETRY = Geometry(
    1,
    3 * (32 * 2 * DIM * 4,),
    tuple(
        Group(tokens, tuple(f"g{number}l{i}" for i in range(layers)), number, reach, reach_tokens)
        for number, ((tokens, _), layers, reach, reach_tokens) in enumerate(
            zip(SHAPES, LAYERS, ("full", "window", "window"), (0, 24, 24), strict=True)
        )
    ),
    CHUNK,
)
ROPES = (
    Rope(np.array([0.5, 0.03, 0.002]), 6, True),
    Rope(np.array([0.9, 0.1]), 4, True),
    NO_ROPE,
)
Numbers = npt.NDArray[np.float32]


def content_of(block_tokens: int, heads: int) -> ContentMap:
    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        cache[0] = torch.cat((key, value), dim=2).transpose(0, 1)

    cache = torch.zeros(1, heads, block_tokens, 2 * DIM)
    return probe(write, cache, 1, block_tokens=block_tokens, num_heads=heads, head_dim=DIM)


def rotations() -> list[Rotation]:
    return [
        Rotation(rope, content_of(*shape), shape[1], DIM, "float32")
        for rope, shape in zip(ROPES, SHAPES, strict=True)
    ]


class World:
    """Three regions in HBM, a pool of random numbers, and an engine."""

    def __init__(self, gpu: FakeGpu | None) -> None:
        random = np.random.default_rng(1)
        self.kv = [torch.zeros(BLOCKS, 1, 32, 2 * DIM) for _ in GEOMETRY.regions]
        layouts = [describe(f"region {i}", kv, BLOCKS) for i, kv in enumerate(self.kv)]
        self.slots = new_slots(SLOTS, GEOMETRY)
        if gpu is not None:
            gpu.hold(*self.kv)
        place = (self.slots.ctypes.data, SLOTS, 0, GEOMETRY, layouts)
        self.engine: CopyEngine = (
            CudaEngine(*place, torch.device("cuda", 0), 0, rotations=rotations())
            if gpu is not None
            else CpuEngine(*place, rotations())
        )
        self.slots.view(np.float32)[:] = random.normal(size=(SLOTS, self.slots.shape[1] // 4))

    def stored(self, group: int, layer: int) -> Numbers:
        """[slots, heads, tokens, K and V] of a slot, as the group's blocks are."""
        tokens, heads = SHAPES[group]
        blocks = GEOMETRY.blocks_per_chunk
        at = GEOMETRY.region_at(layer) // 4
        part = self.slots.view(np.float32)[:, at : at + blocks * 32 * 2 * DIM]
        pages = part.reshape(SLOTS, blocks, heads, tokens, 2 * DIM)
        return pages.transpose(0, 2, 1, 3, 4).reshape(SLOTS, heads, blocks * tokens, 2 * DIM)

    def hbm(self, group: int, layer: int) -> Numbers:
        """[blocks, heads, tokens, K and V]."""
        tokens, heads = SHAPES[group]
        return self.kv[layer].numpy().reshape(BLOCKS, heads, tokens, 2 * DIM)


def turned(numbers: Numbers, shift: int, rope: Rope) -> Numbers:
    """K and V [heads, tokens, 2 * dim] of tokens so many positions farther."""
    out = numbers.astype(np.float64)
    half = rope.rotary_dim // 2
    one, two = numbers[..., :half], numbers[..., half : 2 * half]
    cosine, sine = np.cos(shift * rope.theta), np.sin(shift * rope.theta)
    out[..., :half] = one * cosine - two * sine
    out[..., half : 2 * half] = two * cosine + one * sine
    return out.astype(np.float32)


RUNS = (
    MovedRun(1, 3, 9, 2, 20, -700, 0),
    MovedRun(1, 12, 20, 5, 0, -700, 0),
    MovedRun(3, 30, 7, 1, 9, -700, 1),
    MovedRun(2, 17, 5, 7, 0, 35, 1),
    MovedRun(2, 17, 5, 8, 11, 35, 2),
)


@pytest.mark.parametrize("cuda", [False, True])
def test_each_group_turns_as_its_own(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(install(monkeypatch) if cuda else None)
    wanted = [kv.numpy().copy() for kv in world.kv]
    for slot, first, count, block, within, shift, group in RUNS:
        tokens, heads = SHAPES[group]
        for layer in range(LAYERS[group]):
            source = world.stored(group, layer)[slot, :, first : first + count]
            target = wanted[layer].reshape(BLOCKS, heads, tokens, 2 * DIM)
            target[block, :, within : within + count] = turned(source, shift, ROPES[group])
    loads = Loads(world.engine, GEOMETRY.num_layers)
    loads.begin([LoadPlan(1, "request", (), moves=RUNS)], whole=True)
    loads.end_step()
    loads.close()
    for found, expected in zip(world.kv, wanted, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_a_group_that_a_gpu_turns_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is tried at start, also where the spine is right."""
    gpu = install(monkeypatch)
    world = World(gpu)
    assert isinstance(world.engine, CudaEngine)
    assert world.engine.why_not_moved is None

    def wrong(rotation: Rotation, block_tokens: int) -> dict[str, Any]:
        numbers = rotation_numbers(rotation, block_tokens)
        is_window = rotation.rope is ROPES[1]
        return {**numbers, "theta": [0.5, 0.1]} if is_window else numbers

    monkeypatch.setattr(cuda_engine, "rotation_numbers", wrong)
    engine = World(gpu).engine
    assert isinstance(engine, CudaEngine)
    assert engine.why_not_moved is not None
    assert "wrong in the layers [0, 1, 2]" in engine.why_not_moved


# ---- plans ------------------------------------------------------------------------------------


def pieces_of(slot: int, *parts: tuple[int, int, int | None, int]) -> list[Piece]:
    """Pieces of one group, each of a chunk in the next slot: start, stop, first, and position."""
    found = []
    for number, (start, stop, first, position) in enumerate(parts):
        name = name_of(sequence_of(list(range(1_000)), chunk_tokens=CHUNK), position // CHUNK)
        chunk = Chunk(name, dram=InTier(State.READY, slot=slot + number))
        found.append(Piece(chunk, start, stop, first=first))
    return found


def tokens_planned(
    copies: Sequence[ChunkCopy], runs: Sequence[MovedRun], block_ids: list[int], block_tokens: int
) -> dict[int, tuple[int, int, int]]:
    """Of each token that is filled: the slot, the token of it, and the shift."""
    found = {}
    for slot, first, ids in copies:
        for i, block in enumerate(ids):
            for token in range(block_tokens):
                at = block_ids.index(block) * block_tokens + token
                found[at] = slot, (first + i) * block_tokens + token, 0
    for run in runs:
        for token in range(run.num_tokens):
            at = block_ids.index(run.block_id) * block_tokens + run.within + token
            found[at] = run.slot, run.first + token, run.shift
    return found


def test_a_moved_hit_of_two_groups() -> None:
    """Tokens 0 to 40 in their place, 300 to 350 of the source behind them. The window's last 23:
    of moved tokens no more than these."""
    stop, shift = 90, 40 - 300
    spine = pieces_of(10, (0, 40, None, 0), (40, 60, 44, 256), (60, 90, 0, 320))
    window = [
        Piece(p.chunk, p.start, p.stop, first=p.first, group=1)
        for p in pieces_of(20, (67, 90, 7, 320))
    ]
    tables = [[3, 1, 2], [0, 0, 0, 0, 8, 7]]
    planned = plan_groups([*spine, *window], tables, stop, GEOMETRY)
    found = tokens_planned(*planned[0], tables[0], 32)
    assert {at: found[at] for at in range(40)} == {at: (10, at, 0) for at in range(40)}
    assert {at: found[at] for at in range(40, 60)} == {
        at: (11, at - shift - 256, shift) for at in range(40, 60)
    }
    assert {at: found[at] for at in range(60, 90)} == {
        at: (12, at - shift - 320, shift) for at in range(60, 90)
    }
    assert tokens_planned(*planned[1], tables[1], 16) == {
        at: (20, at - shift - 320, shift) for at in range(67, 90)
    }
    assert {run.group for run in planned[1][1]} == {1}


def test_a_window_across_the_border() -> None:
    """What stands in its place is copied by whole blocks, and what is moved behind it."""
    window = [
        Piece(p.chunk, p.start, p.stop, first=p.first, group=1)
        for p in pieces_of(20, (32, 50, None, 0), (50, 60, 44, 256))
    ]
    spine = pieces_of(10, (0, 50, None, 0), (50, 60, 44, 256))
    tables = [[3, 1], [0, 0, 8, 7]]
    planned = plan_groups([*spine, *window], tables, 60, GEOMETRY)
    assert planned[1][0] == (ChunkCopy(20, 2, (8, 7)),)
    found = tokens_planned(*planned[1], tables[1], 16)
    assert {at: found[at] for at in range(50, 60)} == {
        at: (21, at - 50 + 44, -250) for at in range(50, 60)
    }
