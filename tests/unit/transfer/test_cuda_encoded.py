# SPDX-License-Identifier: Apache-2.0
"""Slots that keep pages encoded, on CUDA over the fake driver: the kernels' cells are those of the
CPU's copies byte for byte, every bit comes back by every way, and what does not fit is told.

It is long since every way of a copy is tried with every kind of page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnstore_vllm.errors import CopyError, DoesNotFitError, UnsupportedError
from attnstore_vllm.transfer import cuda_cells
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.cuda_methods import RULES, Copy, Method, Rule, Rules, only
from attnstore_vllm.transfer.cuda_read_buffer import READ_SIZE, ReadSize
from attnstore_vllm.transfer.engine import CpuEngine, Rotation
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.plan import MovedRun, TransferPlan, moved_table, plan_save
from attnstore_vllm.transfer.rope import Rope
from attnstore_vllm.transfer.worker_copies import Saves
from tests.engine_helpers import ORDERS, new_slots, table
from tests.fake_gpu import BATCH, KERNEL, FakeGpu
from tests.unit.transfer.moved_memory import LAYOUTS, content_map

LAYERS, BLOCKS, TOKENS, HEADS, DIM, WITHIN, SLOTS, ROWS = 3, 12, 16, 2, 32, 4, 5, 6
ALL = range(LAYERS)
PAGE_BYTES = TOKENS * HEADS * 2 * DIM * 2
ENCODED = replace(Geometry.uniform(1, LAYERS, TOKENS, PAGE_BYTES, WITHIN * TOKENS), is_encoded=True)
READ = ReadSize(2, 2 * max(ENCODED.cells))
"""Two spans of two cells each, so that loads go round."""
WAYS: dict[str, Rules] = {
    "kernel": only(Method.KERNEL), "dma": only(Method.DMA), "buffer": only(Method.BUFFER),
    "rules": RULES,
}  # fmt: skip
PAGES = ((3, 0, 5), (3, 1, 0), (3, 3, 11), (1, 2, 7))
BACK = ((3, 3, 4), (1, 2, 3), (3, 0, 2), (3, 1, 1))
INTO = {4: 11, 3: 7, 2: 5, 1: 0}
Bytes = npt.NDArray[np.uint8]


class World:
    """KV of one rank in bfloat16 around zero, and slots full of noise: a CudaEngine, and a
    CpuEngine over slots of its own.

    Args:
        order: of a block's axes, as in tests/engine_helpers.py.
        heads: of each layer.
        dims: of K and V of a head together.
    """

    def __init__(
        self,
        gpu: FakeGpu,
        order: tuple[int, ...] = ORDERS[0],
        geometry: Geometry = ENCODED,
        *,
        rules: Rules = RULES,
        heads: Sequence[int] = LAYERS * (HEADS,),
        tokens: int = TOKENS,
        dims: int = 2 * DIM,
        rank: int = 0,
        rotations: Sequence[Rotation] = (),
        read_size: ReadSize | None = READ,
    ) -> None:
        random = torch.Generator().manual_seed(3)
        self.gpu, self.geometry = gpu, geometry
        self.kv, stored_kv = [], []
        for count in heads:
            shape = (BLOCKS, count, tokens, dims)
            stored = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
            stored_kv.append(stored)
            self.kv.append(stored.permute([order.index(axis) for axis in range(4)]))
        gpu.hold(*stored_kv)
        layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(self.kv)]
        self.slots, self.cpu_slots = new_slots(SLOTS, geometry), new_slots(SLOTS, geometry)
        self.cuda = CudaEngine(
            self.slots.ctypes.data, SLOTS, rank, geometry, layouts, torch.device("cuda", 0),
            ROWS, rules, rotations, read_size=read_size,
        )  # fmt: skip
        assert self.cuda.why_not_moved is None
        self.cuda.rules = rules
        self.cpu = CpuEngine(
            self.cpu_slots.ctypes.data, SLOTS, rank, geometry, layouts, list(rotations)
        )
        for kv in self.kv:
            kv[:] = torch.randn(kv.shape, generator=random).bfloat16()
        noise = np.random.default_rng(1).integers(0, 256, self.slots.shape, np.uint8)
        self.slots[:], self.cpu_slots[:] = noise, noise

    def hbm(self) -> list[torch.Tensor]:
        """Copies, as integers: NaN is no NaN."""
        self.gpu.synchronize()
        return [kv.contiguous().view(torch.int16).clone() for kv in self.kv]

    def save(self, pages: npt.NDArray[np.int64], layers: range = ALL) -> None:
        self.cuda.wait(self.cuda.save(pages, layers))

    def save_through_rows(self, pages: npt.NDArray[np.int64], layers: range = ALL) -> None:
        rows = np.arange(ROWS)[::-1][: len(pages)].copy()
        self.cuda.gather(pages, rows, layers)
        self.cuda.wait(self.cuda.drain(pages, rows, layers))

    def load(self, pages: npt.NDArray[np.int64], layers: range = ALL) -> None:
        self.cuda.wait(self.cuda.load(pages, layers))

    def spoil(self, layer: int, block: int) -> None:
        """Its numbers have all exponents."""
        bits = self.kv[layer][block].view(torch.int16)
        bits[:] = (torch.arange(bits.numel()) * 31).reshape(bits.shape)

    def check_cells(self, pages: npt.NDArray[np.int64]) -> None:
        """All slots are as the CPU's copies would have made them."""
        self.cpu.wait(self.cpu.save(pages, range(self.geometry.num_layers)))
        assert np.array_equal(self.slots, self.cpu_slots)


Opens = Callable[..., World]


@pytest.fixture
def open_world(fake: FakeGpu) -> Iterator[Opens]:
    opened: list[World] = []

    def open_world(*arguments: Any, **options: Any) -> World:
        opened.append(World(fake, *arguments, **options))
        return opened[-1]

    yield open_world
    for world in opened:
        world.cuda.close()


def check_round_trip(world: World, *, rows: bool) -> None:
    before, layers = world.hbm(), range(world.geometry.num_layers)
    (world.save_through_rows if rows else world.save)(table(*PAGES), layers)
    assert all(map(torch.equal, world.hbm(), before))
    world.check_cells(table(*PAGES))
    world.load(table(*BACK), layers)
    for now, old in zip(world.hbm(), before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(now[block], old[INTO.get(block, block)]), block


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_bit_comes_back(
    open_world: Opens, order: tuple[int, ...], way: str, rows: bool
) -> None:
    world = open_world(order, rules=WAYS[way])
    for kv in world.kv:  # what few numbers are: as escapes
        kv[5, 0, 0, :6] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 3e38, 1e-40])
        kv[7, :, 0] = 0
        kv[7, 0, 3] = 1e-3
    check_round_trip(world, rows=rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "dims"), [(1, 2), (1, 6), (3, 10), (16, 34), (5, 101 * 2)])
def test_pages_of_odd_sizes(open_world: Opens, tokens: int, dims: int, way: str) -> None:
    """Numbers that are no whole words of codes, and groups that are not full."""
    page = tokens * dims * 2
    shapes = Geometry.uniform(1, LAYERS, tokens, page, WITHIN * tokens)
    geometry = replace(shapes, is_encoded=True)
    one = LAYERS * (1,)
    check_round_trip(
        open_world(geometry=geometry, heads=one, tokens=tokens, dims=dims, rules=WAYS[way]),
        rows=True,
    )


def test_layers_of_several_kinds(open_world: Opens) -> None:
    heads = (2, 2, 5)
    regions = tuple(TOKENS * count * 2 * DIM * 2 for count in heads)
    groups = (Group(TOKENS, ("a", "b", "c")),)
    geometry = Geometry(1, regions, groups, WITHIN * TOKENS, is_encoded=True)
    world = open_world(geometry=geometry, heads=heads)
    check_round_trip(world, rows=True)
    for layer, block in ((0, 5), (2, 7)):  # of slots 3 and 1
        world.spoil(layer, block)
    for save in (world.save, world.save_through_rows):
        with pytest.raises(DoesNotFitError) as told:
            save(table(*PAGES))
        assert told.value.slots == {1, 3}


def test_ranks_have_parts_of_their_own(open_world: Opens) -> None:
    two = replace(ENCODED, num_ranks=2)
    world = open_world(geometry=two, rank=1)
    slots = world.slots.copy()
    check_round_trip(world, rows=True)
    assert np.array_equal(world.slots[:, : two.rank_bytes], slots[:, : two.rank_bytes])
    world.spoil(1, 7)
    with pytest.raises(DoesNotFitError) as told:
        world.save(table(*PAGES))
    assert told.value.slots == {1}


def test_the_other_slots_of_a_save_that_does_not_fit_are_right(open_world: Opens) -> None:
    world = open_world()
    world.spoil(2, 7)
    with pytest.raises(DoesNotFitError) as told:
        world.save_through_rows(table(*PAGES))
    assert told.value.slots == {1}
    with pytest.raises(CopyError, match="holds no encoded page"):
        world.load(table((1, 2, 3)))
    before = world.hbm()
    world.load(table((3, 3, 4)))
    for now, old in zip(world.hbm(), before, strict=True):
        assert torch.equal(now[4], old[11])
    # What fits later is not told again, nor what the slots of others have.
    world.save(table((2, 0, 1)))
    world.kv[2][7] = 0
    world.save(table(*PAGES))
    world.load(table(*BACK))


def test_a_save_tells_of_its_layers_alone(open_world: Opens) -> None:
    world = open_world()
    world.spoil(0, 7)
    with pytest.raises(DoesNotFitError):
        world.save(table(*PAGES), range(1))
    world.save(table(*PAGES), range(1, 3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", ["base", "count", "code", "more escapes than there is room"])
def test_a_damaged_cell_is_refused_and_touches_nothing_else(
    open_world: Opens, way: str, at: str
) -> None:
    world = open_world(rules=WAYS[way])
    world.save(table(*PAGES))
    before = world.hbm()
    numbers = PAGE_BYTES // 2
    bases = numbers + numbers // 8 * 3
    counts = bases + numbers // 256
    cell = world.slots[1, ENCODED.region_at(1) + 2 * ENCODED.cells[1] :]
    if at == "base":
        cell[bases + 1] = 250
    elif at == "count":
        cell[counts + numbers // 256 - 1] ^= 1
    elif at == "code":
        cell[numbers] = 255
    else:
        cell[counts : counts + numbers // 256] = 255
    with pytest.raises(CopyError, match="holds no encoded page"):
        world.load(table(*BACK))
    for layer, (now, old) in enumerate(zip(world.hbm(), before, strict=True)):
        for block in set(range(BLOCKS)) - {3}:
            assert torch.equal(now[block], old[INTO.get(block, block)]), (layer, block)
    world.load(table((3, 0, 2)))


def test_what_was_damaged_at_random_touches_nothing_else(open_world: Opens) -> None:
    world, random = open_world(), np.random.default_rng(5)
    world.save(table(*PAGES))
    good, before = world.slots.copy(), world.hbm()
    for number in range(60):
        world.cuda.rules = list(WAYS.values())[number % len(WAYS)]
        world.slots[:] = good
        cell = world.slots[1, : ENCODED.rank_bytes]
        places = random.integers(0, len(cell), random.integers(1, 400))
        cell[places] = random.integers(0, 256, len(places), np.uint8)
        with suppress(CopyError):  # most are, and what is left is a page
            world.load(table((1, 2, 3)))
        for now, old in zip(world.hbm(), before, strict=True):
            for block in set(range(BLOCKS)) - {3}:
                assert torch.equal(now[block], old[block])


def test_loads_have_words_of_their_own(open_world: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has failed says nothing of another, and a word that is used again is as new."""
    monkeypatch.setattr(cuda_cells, "_WORDS", 3)
    world = open_world()
    world.save(table(*PAGES))
    world.slots[1] = 255
    events = [world.cuda.load(table(page), ALL) for page in (BACK[0], BACK[1], BACK[2])]
    world.cuda.wait(events[0])
    for _ in range(2):  # each time that it is asked
        with pytest.raises(CopyError):
            world.cuda.wait(events[1])
    world.cuda.wait(events[2])
    for _ in range(4):
        world.load(table(BACK[0]))


def test_a_word_of_a_load_in_flight_is_not_cleared(
    open_world: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more loads than words, and the first one has failed before any was asked."""
    monkeypatch.setattr(cuda_cells, "_WORDS", 3)
    world = open_world()
    world.save(table(*PAGES))
    world.slots[1] = 255
    failed = world.cuda.load(table(BACK[1]), ALL)
    world.gpu.synchronize()
    others = [world.cuda.load(table(page), ALL) for page in (BACK[0], BACK[2], BACK[3])]
    with pytest.raises(CopyError):
        world.cuda.wait(failed)
    for event in others[:2]:
        world.cuda.wait(event)
    with suppress(CopyError):  # it has that word, too
        world.cuda.wait(others[2])
    for _ in range(4):
        world.load(table(BACK[0]))


@pytest.mark.parametrize(
    ("rules", "kernels", "batches"),
    [("kernel", 1, 0), ("dma", 2 * LAYERS, 2 * LAYERS), ("buffer", 2 * LAYERS, 2 * LAYERS)],
)
def test_cells_are_filled_by_dma_and_decoded_on_the_way_to_blocks(
    open_world: Opens, rules: str, kernels: int, batches: int
) -> None:
    """Four pages are two spans, of each layer."""
    world = open_world(rules=WAYS[rules])
    world.save(table(*PAGES))
    before = {call: world.gpu.count(call) for call in (KERNEL, BATCH)}
    world.load(table(*BACK))
    counts = {call: world.gpu.count(call) - before[call] for call in before}
    assert counts == {KERNEL: kernels, BATCH: batches}


def test_without_a_read_buffer_the_kernel_reads_slots(open_world: Opens) -> None:
    world = open_world(rules=WAYS["dma"], read_size=ReadSize(0, 0))
    check_round_trip(world, rows=True)


def test_there_is_a_read_buffer_where_pages_are_encoded(open_world: Opens) -> None:
    assert open_world(read_size=None).cuda.read_buffer.size == READ_SIZE


def test_short_runs_of_cells_go_as_a_rule_says(open_world: Opens) -> None:
    long, short = 2 * ENCODED.cells[0], ENCODED.cells[0]
    rules = {**RULES, Copy.LOAD: (Rule(long, Method.DMA), Rule(0, Method.KERNEL))}
    world = open_world(rules=rules)
    world.save(table((3, 0, 5), (3, 1, 0), (1, 2, 7)))
    for pages, batches in ((((3, 0, 5), (3, 1, 0)), LAYERS), (((1, 2, 7),), 0)):
        before = world.gpu.count(BATCH)
        world.load(table(*pages))
        assert world.gpu.count(BATCH) - before == batches, (pages, short)


def test_a_chunk_that_does_not_fit_is_given_up_and_the_others_are_not(
    open_world: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    world = open_world()
    world.spoil(1, 7)
    saves = Saves(world.cuda, LAYERS, queue_blocks=ROWS)
    plans = [plan_of(1, slot=1, block=7), plan_of(2, slot=3, block=5)]
    saves.begin_step([], plans, (), by_layer=True)
    for layer in ALL:
        saves.layer_computed(layer)
    saves.end_step([])
    world.gpu.synchronize()
    saves.begin_step([], [], (), by_layer=False)
    assert saves.take_finished() == ([2], [1])
    assert "does not fit in the room" in caplog.text
    saves.begin_step([], [plan_of(3, slot=2, block=5)], (), by_layer=False)
    saves.end_step([])
    world.gpu.synchronize()
    saves.begin_step([], [], (), by_layer=False)
    assert saves.take_finished() == ([3], [])


def plan_of(number: int, slot: int, block: int) -> TransferPlan:
    copies = plan_save(slot, [block], 0, TOKENS, block_tokens=TOKENS)
    return TransferPlan(number, f"r{number}", copies)


RUNS = (
    MovedRun(1, 5, 11, 0, 5, 3),
    MovedRun(3, 20, 5, 0, 0, -7),
    MovedRun(1, 30, 16, 2, 0, 100),
    MovedRun(3, 63, 1, 3, 9, 1),
    MovedRun(3, 0, 16, 4, 0, 0),
)


@pytest.mark.parametrize("layers", [ALL, range(1, 2)], ids=str)
def test_moved_tokens_are_those_of_slots_that_are_not_encoded(
    open_world: Opens, layers: range
) -> None:
    """Of several chunks into one block, several of one, and from every token on."""
    content = content_map(LAYOUTS["LBHNC"], TOKENS, HEADS, DIM, torch.bfloat16)
    theta = 10_000.0 ** -(np.arange(DIM // 2) / (DIM // 2))
    rotation = Rotation(Rope(theta, DIM, True), content, HEADS, DIM, "bfloat16")
    found: list[Any] = []
    for geometry in (ENCODED, ENCODED.decoded):
        world = open_world(geometry=geometry, rotations=[rotation])
        for slot in (1, 3):
            blocks = range(slot + 4, slot + 8)
            world.save(table(*((slot, within, block) for within, block in enumerate(blocks))))
        world.cuda.wait(world.cuda.move(moved_table(RUNS), layers))
        found.append(world.hbm())
    for encoded, raw in zip(*found, strict=True):
        assert torch.equal(encoded, raw)
    assert not torch.equal(found[0][1][2], found[0][1][8])


def test_moving_out_of_a_slot_without_pages_fails(open_world: Opens) -> None:
    content = content_map(LAYOUTS["LBHNC"], TOKENS, HEADS, DIM, torch.bfloat16)
    rotation = Rotation(Rope(np.array([0.5]), 2, True), content, HEADS, DIM, "bfloat16")
    world = open_world(rotations=[rotation])
    with pytest.raises(CopyError, match="holds no encoded page"):
        world.cuda.wait(world.cuda.move(moved_table([MovedRun(1, 0, 4, 0, 0, 3)])))
    for run in (MovedRun(SLOTS, 0, 4, 1, 0, 0), MovedRun(0, 62, 4, 1, 0, 0)):
        with pytest.raises(IndexError):
            world.cuda.move(moved_table([run]))


@pytest.mark.parametrize("kernel", ["decode_pages_16", "encode_pages_16"])
def test_a_kernel_that_codes_wrongly_is_found_at_the_start(fake: FakeGpu, kernel: str) -> None:
    fake.damage(kernel)
    with pytest.raises(UnsupportedError, match=r"other bytes|cannot copy"):
        World(fake)
