# SPDX-License-Identifier: Apache-2.0
"""Slots that keep pages encoded: every bit comes back, and what does not fit is told.

csrc/tests/test_encoded.cpp has the encoding itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnstore_vllm import _native
from attnstore_vllm.errors import CopyError, DoesNotFitError
from attnstore_vllm.transfer.engine import CpuEngine, Rotation, bytes_of
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.plan import MovedRun, TransferPlan, moved_table, plan_save
from attnstore_vllm.transfer.rope import Rope
from attnstore_vllm.transfer.worker_copies import Saves
from tests.engine_helpers import ORDERS, new_slots, table
from tests.unit.transfer.moved_memory import LAYOUTS, content_map

LAYERS, BLOCKS, TOKENS, HEADS, DIM, WITHIN, SLOTS = 3, 12, 16, 2, 32, 4, 5
ALL = range(LAYERS)
PAGE_BYTES = TOKENS * HEADS * 2 * DIM * 2
ENCODED = replace(Geometry.uniform(1, LAYERS, TOKENS, PAGE_BYTES, WITHIN * TOKENS), is_encoded=True)
Bytes = npt.NDArray[np.uint8]


class World:
    """KV of one rank in bfloat16 around zero, and slots full of noise.

    Args:
        order: of a block's axes, as in tests/engine_helpers.py.
        sizes: heads of each layer.
    """

    def __init__(
        self,
        order: tuple[int, ...] = ORDERS[0],
        geometry: Geometry = ENCODED,
        *,
        rank: int = 0,
        sizes: Sequence[int] = LAYERS * (HEADS,),
        rotations: Sequence[Rotation] = (),
    ) -> None:
        random = torch.Generator().manual_seed(3)
        self.geometry = geometry
        self.kv = []
        for heads in sizes:
            shape = (BLOCKS, heads, TOKENS, 2 * DIM)
            stored = torch.randn([shape[axis] for axis in order], generator=random).bfloat16()
            self.kv.append(stored.permute([order.index(axis) for axis in range(4)]))
        layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(self.kv)]
        self.slots = new_slots(SLOTS, geometry)
        self.slots[:] = np.random.default_rng(1).integers(0, 256, self.slots.shape, np.uint8)
        place = (self.slots.ctypes.data, SLOTS, rank, geometry, layouts)
        self.engine = CpuEngine(*place, rotations)

    def hbm(self) -> list[torch.Tensor]:
        """Copies, as integers: NaN is no NaN."""
        return [kv.contiguous().view(torch.int16).clone() for kv in self.kv]

    def save(self, pages: npt.NDArray[np.int64], layers: range = ALL) -> None:
        self.engine.wait(self.engine.save(pages, layers))

    def load(self, pages: npt.NDArray[np.int64], layers: range = ALL) -> None:
        self.engine.wait(self.engine.load(pages, layers))


PAGES = ((3, 0, 5), (3, 1, 0), (3, 3, 11), (1, 2, 7))
BACK = ((3, 3, 4), (1, 2, 3), (3, 0, 2), (3, 1, 1))
INTO = {4: 11, 3: 7, 2: 5, 1: 0}


def check_round_trip(world: World) -> None:
    before = world.hbm()
    world.save(table(*PAGES))
    assert all(map(torch.equal, world.hbm(), before))
    world.load(table(*BACK))
    for now, old in zip(world.hbm(), before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(now[block], old[INTO.get(block, block)]), block


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_bit_comes_back(order: tuple[int, ...]) -> None:
    world = World(order)
    for kv in world.kv:  # what few numbers are: as escapes
        kv[5, 0, 0, :6] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 3e38, 1e-40])
    slots = world.slots.copy()
    check_round_trip(world)
    assert np.array_equal(world.slots[[0, 2, 4]], slots[[0, 2, 4]])
    used = WITHIN * sum(ENCODED.cells)
    assert np.array_equal(world.slots[:, used:], slots[:, used:])


def test_layers_of_several_kinds() -> None:
    sizes = (2, 2, 5)
    regions = tuple(TOKENS * heads * 2 * DIM * 2 for heads in sizes)
    groups = (Group(TOKENS, ("a", "b", "c")),)
    geometry = Geometry(1, regions, groups, WITHIN * TOKENS, is_encoded=True)
    world = World(geometry=geometry, sizes=sizes)
    slots = world.slots.copy()
    check_round_trip(world)
    assert np.array_equal(world.slots[[0, 2, 4]], slots[[0, 2, 4]])
    for layer, block in ((0, 5), (2, 7)):  # of slots 3 and 1
        bits = world.kv[layer][block].view(torch.int16)
        bits[:] = (torch.arange(bits.numel()) * 31).reshape(bits.shape)
    with pytest.raises(DoesNotFitError) as told:
        world.save(table(*PAGES))
    assert told.value.slots == {1, 3}


def test_ranks_have_parts_of_their_own() -> None:
    two = replace(ENCODED, num_ranks=2)
    assert two.slot_bytes == 2 * two.rank_bytes
    world = World(geometry=two, rank=1)
    slots = world.slots.copy()
    check_round_trip(world)
    assert np.array_equal(world.slots[:, : two.rank_bytes], slots[:, : two.rank_bytes])


def test_a_layer_at_a_time() -> None:
    world = World()
    before = world.hbm()
    for layer in ALL:
        world.save(table(*PAGES), range(layer, layer + 1))
    world.load(table(*BACK), range(1, 2))
    now = world.hbm()
    assert torch.equal(now[0], before[0]) and torch.equal(now[2], before[2])
    assert torch.equal(now[1][4], before[1][11])


def test_all_65536_patterns() -> None:
    """With room for them: no exponent is more frequent than another one."""
    numbers = np.random.default_rng(2).permutation(1 << 16).astype(np.uint16)
    back = np.zeros_like(numbers)
    cell = np.zeros(3 * numbers.nbytes, np.uint8)

    def copier(memory: npt.NDArray[np.uint16]) -> _native.EncodedCopier:
        shape = _native.PageShape(
            slots_base=cell.ctypes.data,
            num_slots=1,
            slot_bytes=cell.nbytes,
            layer_bytes=memory.nbytes,
            page_bytes=memory.nbytes,
            layer_bases=[memory.ctypes.data],
            num_blocks=1,
            block_stride=memory.nbytes,
            run_offsets=[0],
            run_bytes=memory.nbytes,
        )
        return _native.EncodedCopier(shape, cell.nbytes)

    assert copier(numbers).save(table((0, 0, 0)), 0, 1) == []
    copier(back).load(table((0, 0, 0)), 0, 1)
    assert np.array_equal(back, numbers)


def test_what_does_not_fit_is_told_and_the_rest_is_right() -> None:
    world = World()
    world.kv[1][7] = (
        torch.randint(-(1 << 15), 1 << 15, (HEADS, TOKENS, 2 * DIM)).short().view(torch.bfloat16)
    )
    before = world.hbm()
    with pytest.raises(DoesNotFitError) as told:
        world.save(table(*PAGES))
    assert told.value.slots == {1}
    world.load(table((3, 3, 4)))
    assert all(torch.equal(n[4], old[11]) for n, old in zip(world.hbm(), before, strict=True))


def test_saves_of_what_does_not_fit_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """The others of the same step are whole, and a model of which nothing fits says it once."""
    world = World()
    world.kv[2][7].view(torch.int16)[:] = (
        torch.arange(HEADS * TOKENS * 2 * DIM).reshape(HEADS, TOKENS, 2 * DIM) * 31
    )
    saves = Saves(world.engine, LAYERS, queue_blocks=BLOCKS)
    for first in (0, 10):
        plans = [
            TransferPlan(first + slot, f"r{slot}", plan_save(slot, ids, 0, 32, block_tokens=TOKENS))
            for slot, ids in enumerate(([1, 2], [6, 7], [8, 9]))
        ]
        saves.begin_step((), plans, (), by_layer=False)
        saves.end_step(())
        assert saves.take_finished() == ([first, first + 2], [first + 1])
    assert caplog.text.count("does not fit in the room that DRAM has") == 1


def test_a_slot_without_pages_fails_the_load() -> None:
    world = World()
    world.slots[:] = 0xFF
    before = world.hbm()
    with pytest.raises(CopyError, match="slot 3 holds no encoded page"):
        world.load(table((3, 0, 4)))
    assert all(map(torch.equal, world.hbm(), before))


def test_a_copy_of_what_does_not_exist_is_refused() -> None:
    world = World()
    for page in ((SLOTS, 0, 0), (0, WITHIN, 0), (0, 0, BLOCKS), (-1, 0, 0)):
        for copy in (world.engine.load, world.engine.save):
            with pytest.raises(IndexError):
                copy(table(page), ALL)


def test_slots_are_smaller_and_the_namespace_says_so() -> None:
    raw = ENCODED.decoded
    assert ENCODED.slot_bytes <= 0.76 * raw.slot_bytes
    assert raw.cells == raw.regions and max(ENCODED.cells) < 0.76 * PAGE_BYTES
    assert ENCODED.facts() == raw.facts() | {"encoding": ["lossless/1", *ENCODED.cells]}
    assert bytes_of(ENCODED, ALL) == sum(ENCODED.cells)
    large = replace(Geometry.uniform(1, 32, 16, 1 << 16, 256), is_encoded=True)
    assert 0.74 <= large.slot_bytes / large.decoded.slot_bytes < 0.741


def rotation(name: str) -> Rotation:
    layout = LAYOUTS[name]
    content = content_map(layout, TOKENS, HEADS, DIM, torch.bfloat16)
    theta = 10_000.0 ** -(np.arange(DIM // 2) / (DIM // 2))
    return Rotation(Rope(theta, DIM, True), content, HEADS, DIM, "bfloat16")


@pytest.mark.parametrize("layers", [ALL, range(1, 2)], ids=str)
def test_tokens_move_as_out_of_slots_that_are_not_encoded(layers: range) -> None:
    """Of several chunks into one block, several of one, and from every token on."""
    runs = [
        MovedRun(1, 5, 11, 0, 5, 3),
        MovedRun(3, 20, 5, 0, 0, -7),
        MovedRun(1, 30, 16, 2, 0, 100),
        MovedRun(3, 63, 1, 3, 9, 1),
        MovedRun(3, 0, 16, 4, 0, 0),
    ]
    found: list[Any] = []
    for geometry in (ENCODED, ENCODED.decoded):
        world = World(geometry=geometry, rotations=[rotation("LBHNC")])
        for slot in (1, 3):
            blocks = range(slot + 4, slot + 8)
            world.save(table(*((slot, within, block) for within, block in enumerate(blocks))))
        world.engine.move(moved_table(runs), layers)
        found.append(world.hbm())
    for encoded, raw in zip(*found, strict=True):
        assert torch.equal(encoded, raw)


def test_moving_out_of_a_slot_without_pages_fails() -> None:
    world = World(rotations=[rotation("LBHNC")])
    world.slots[:] = 0xFF
    event = world.engine.move(moved_table([MovedRun(1, 0, 4, 0, 0, 3)]))
    for waits in (world.engine.wait, world.engine.model_waits):
        with pytest.raises(CopyError, match="holds no encoded page"):
            waits(event)
    assert world.engine.measured() == []
