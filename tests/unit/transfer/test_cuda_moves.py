# SPDX-License-Identifier: Apache-2.0
"""CudaEngine.move over tests/fake_gpu.py, and over a GPU where there is one."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attnstore_vllm.errors import CopyError
from attnstore_vllm.transfer import cuda_engine, cuda_tables
from attnstore_vllm.transfer.cuda_moves import TokenMover
from attnstore_vllm.transfer.engine import rotation_numbers
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, MovedRun, moved_table
from attnstore_vllm.transfer.worker_copies import Loads
from tests.cuda_helpers import CudaRig, Opens, Story, move_expected, moves, rigs, rotation_of
from tests.engine_helpers import (
    ALL,
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    ORDERS,
    PAGE_BYTES,
    SLOTS,
    WITHIN,
    Rig,
    table,
)
from tests.fake_gpu import BATCH, KERNEL, FakeGpu
from tests.native_shapes import rotator
from tests.unit.transfer.moved_cuda import CudaMoved
from tests.unit.transfer.moved_memory import LAYOUTS
from tests.unit.transfer.test_moved_load import BF16, SHIFTS, layouts_and_types, theta_of


@pytest.fixture
def open_rig(gpu: FakeGpu | None) -> Iterator[Opens]:
    yield from rigs(gpu, moves=True)


# ---- the numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("is_neox", [True, False], ids=["NeoX", "GPT-J"])
@pytest.mark.parametrize(("name", "dtype"), layouts_and_types(), ids=str)
def test_random_moves(gpu: FakeGpu | None, name: str, dtype: torch.dtype, is_neox: bool) -> None:
    """As tests/unit/transfer/test_moved_load.py has them on the CPU."""
    sizes = [(16, 2, 32, 16), (16, 3, 64, 16)]
    if gpu is None:
        sizes += [(16, 8, 128, 64), (32, 2, 96, 7), (16, 1, 80, 20)]
    for number, (block_tokens, heads, dim, pairs) in enumerate(sizes):
        memory = CudaMoved(
            gpu,
            LAYOUTS[name],
            dtype,
            theta=theta_of(pairs),
            is_neox=is_neox,
            block_tokens=block_tokens,
            heads=heads,
            dim=dim,
            seed=number,
        )
        rng = np.random.default_rng(number)
        for _ in range(2):
            shifts = rng.choice(np.array((0, *SHIFTS)), int(rng.integers(1, 4)))
            memory.check(memory.some_runs(rng, list(shifts)))
        memory.check([MovedRun(1, 3, 9, 2, 4, 7)], range(1, 2))
        memory.check([])
        memory.engine.close()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_making_one_leaves_blocks_and_slots_as_they_were(
    open_rig: Opens, order: tuple[int, ...]
) -> None:
    before = Rig(order, None).hbm()
    rig = open_rig(order)
    assert np.array_equal(rig.hbm(), before)
    assert not rig.slots.any()


# ---- the order -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_what_keeps_the_rules_is_as_if_nothing_overlapped(open_rig: Opens, seed: int) -> None:
    rig = open_rig(ORDERS[seed % 4])
    if rig.gpu is not None:
        rig.gpu.set(seed=seed)
    Story(rig, seed).run(250)


def test_a_move_comes_after_the_load_and_the_model_before_it(open_rig: Opens) -> None:
    """Neither is waited for by the host."""
    rig = open_rig()
    rig.pages[:] = np.random.default_rng(1).integers(0, 256, rig.pages.shape, np.uint8)
    wanted = rig.hbm()
    for _ in range(9):
        rig.compute(lambda: rig.overwrite(7))
    wanted[:, 7] = (wanted[:, 7].view(np.int16) + 9).view(np.uint8)
    rig.engine.load(table((2, 1, 5)), ALL)
    wanted[:, 5] = rig.pages[2, :, 1]
    event = rig.engine.move(moves((3, 5, 2, 5, 1, 0), (1, 0, 3, 7, 0, 0)), ALL)
    move_expected(rig, rig.pages, wanted, (3, 5, 2, 5, 1))
    move_expected(rig, rig.pages, wanted, (1, 0, 3, 7, 0))
    rig.engine.model_waits(event)
    rig.compute(lambda: rig.overwrite(5))
    wanted[:, 5] = (wanted[:, 5].view(np.int16) + 1).view(np.uint8)
    rig.settle()
    assert np.array_equal(rig.hbm(), wanted)


def test_a_table_is_not_overwritten_while_a_kernel_may_read_it(
    open_rig: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring that has room for a few tables, of loads and of moves."""
    monkeypatch.setattr(cuda_tables.TableRing.__init__, "__defaults__", (64,))
    rig = open_rig()
    rng = np.random.default_rng(5)
    rig.pages[:] = rng.integers(0, 256, rig.pages.shape, np.uint8)
    wanted = rig.hbm()
    for i in range(60):
        slot, block = int(rng.integers(SLOTS)), i % BLOCKS
        run = (slot, int(rng.integers(WITHIN * BLOCK_TOKENS - 2)), 2, block, i % 3)
        for layer in ALL:
            rig.engine.move(moves((*run, 0)), range(layer, layer + 1))
        move_expected(rig, rig.pages, wanted, run)
        rig.engine.load(table((slot, 1, (i + 9) % BLOCKS)), ALL)
        wanted[:, (i + 9) % BLOCKS] = rig.pages[slot, :, 1]
    rig.settle()
    assert np.array_equal(rig.hbm(), wanted)


def test_more_tokens_than_a_table_has(open_rig: Opens) -> None:
    rig = open_rig()
    (mover,) = rig.cuda.token_movers
    mover.words_at_once = 24
    rig.pages[:] = np.random.default_rng(2).integers(0, 256, rig.pages.shape, np.uint8)
    wanted = rig.hbm()
    before = 0 if rig.gpu is None else rig.gpu.count(KERNEL)
    runs = [(i % SLOTS, i % 9, 1 + i % BLOCK_TOKENS, i, 0) for i in range(20)]
    rig.engine.wait(rig.engine.move(moves(*((*run, 0) for run in runs)), ALL))
    for run in runs:
        move_expected(rig, rig.pages, wanted, run)
    assert np.array_equal(rig.hbm(), wanted)
    assert rig.gpu is None or rig.gpu.count(KERNEL) > before + 5


def test_the_layers_of_a_move_have_one_table(fake: FakeGpu) -> None:
    rig = CudaRig(fake, moves=True)
    before = fake.uploads
    for layer in ALL:
        rig.engine.move(moves((0, 0, 3, 1, 0, 5)), range(layer, layer + 1))
    assert fake.uploads == before + 1
    rig.engine.move(moves((0, 0, 3, 1, 0, 6)), ALL)
    assert fake.uploads == before + 2
    fake.synchronize()
    rig.engine.measured()
    rig.engine.wait(rig.engine.move(moves((0, 0, 3, 1, 0, 6), (1, 0, 1, 2, 0, 6)), range(2)))
    ((num_bytes, seconds),) = rig.engine.measured()
    assert num_bytes == 4 * 2 * PAGE_BYTES // BLOCK_TOKENS
    assert seconds > 0


# ---- what fails ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "layers"),
    [
        ((SLOTS, 0, 1, 0, 0, 1), ALL), ((0, WITHIN * BLOCK_TOKENS, 1, 0, 0, 1), ALL),
        ((0, 0, 0, 0, 0, 1), ALL), ((0, 0, 2, 0, BLOCK_TOKENS - 1, 1), ALL),
        ((0, 0, 1, BLOCKS, 0, 1), ALL), ((0, 0, 1, -1, 0, 1), ALL), ((0, 0, 2, 4, 1, 1), ALL),
        ((0, 0, 1, 0, 0, 1), range(LAYERS + 1)), ((0, 0, 1, 0, 0, 1), range(-1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_exist_is_refused_before_anything_moves(
    open_rig: Opens, run: tuple[int, int, int, int, int, int], layers: range
) -> None:
    """Also what another table of the same move names."""
    rig = open_rig()
    before = rig.hbm()
    (mover,) = rig.cuda.token_movers
    mover.words_at_once = 8
    good = (1, 1, 2, 4, 2, 9)
    with pytest.raises(IndexError, match=r"does not exist|named twice"):
        rig.engine.move(moves(good, (1, 1, 2, 9, 2, 9), run), layers)
    rig.settle()
    assert np.array_equal(rig.hbm(), before)


@pytest.mark.parametrize("well", [0, 1])
def test_a_move_that_cuda_refuses_is_an_event_that_failed(fake: FakeGpu, well: int) -> None:
    """Nothing that was begun for it is in flight any more; the next one is not touched."""
    rig = CudaRig(fake, moves=True)
    (mover,) = rig.cuda.token_movers
    mover.words_at_once = 8
    fake.fail(KERNEL, well)
    runs = moves((0, 0, 2, 1, 0, 0), (0, 2, 2, 2, 0, 0))
    event = rig.engine.move(runs, ALL)
    assert not rig.cuda._loads.pending
    for ask in (event.done, lambda: rig.engine.wait(event), lambda: rig.engine.model_waits(event)):
        with pytest.raises(CopyError, match="CUDA_ERROR_UNKNOWN"):
            ask()
    rig.pages[:] = 3
    wanted = rig.hbm()
    rig.engine.wait(rig.engine.move(runs, ALL))
    for run in ((0, 0, 2, 1, 0), (0, 2, 2, 2, 0)):
        move_expected(rig, rig.pages, wanted, run)
    assert np.array_equal(rig.hbm(), wanted)


def test_a_load_that_fails_before_a_move_that_does_not(fake: FakeGpu) -> None:
    """The move's event is the one that the layers have, so it could hide it."""
    rig = CudaRig(fake, moves=True)
    loads = Loads(rig.engine, LAYERS)
    for call in (KERNEL, BATCH):
        fake.fail(call)
    runs = (MovedRun(1, 0, 2, 5, 2, 7),)
    plan = LoadPlan(1, "request", (ChunkCopy(0, 0, (5,)),), moves=runs)
    loads.begin_step((), whole=False)
    with pytest.raises(CopyError, match="CUDA_ERROR_UNKNOWN"):
        loads.begin([plan], whole=False)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("refused", "this GPU cannot move KV to other positions: .*CUDA_ERROR_UNKNOWN"),
        ("damaged", r"KV that was moved .* on this GPU is wrong in the layers \[0, 1, 2\]"),
        ("of three heads", "K and V .* are not a page"),
    ],
)
def test_where_it_cannot_be_moved_everything_else_works(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    if what == "refused":
        fake.fail("move_tokens")
    elif what == "damaged":
        fake.damage("move_tokens")
    else:
        monkeypatch.setattr(
            cuda_engine, "rotation_numbers", lambda *of: {**rotation_numbers(*of), "num_heads": 3}
        )
    rig = CudaRig(fake, moves=True)
    assert re.fullmatch(why + ".*", str(rig.cuda.why_not_moved))
    before = Rig(ORDERS[2], None).hbm()
    assert np.array_equal(rig.hbm(), before)
    assert not rig.slots.any()
    rig.save(table((0, 0, 1)))
    rig.load(table((0, 0, 2)))
    assert np.array_equal(rig.hbm()[:, 2], before[:, 1])


# ---- tables, as the native code makes them ---------------------------------------------


def test_no_table_is_longer_than_it_may_be() -> None:
    native = importlib.import_module("attnstore_vllm._native_cuda")
    rng = np.random.default_rng(3)
    pages = {
        "kernels": None, "slots_base": 1 << 20, "num_slots": 4, "slot_bytes": 1 << 16,
        "layer_bytes": 1 << 14, "page_bytes": 1 << 13, "layer_bases": [1 << 30], "num_blocks": 999,
        "block_stride": 1 << 13, "run_offsets": [0], "run_bytes": 1 << 13, "arrays": 0,
    }  # fmt: skip
    # Where all turn alike, only the first part's own runs begin a turn, and each table has it.
    for pairs, alike in itertools.product((0, 1, 7, 64), (False, True)):
        turning = {
            "key": (0, 256, 16, 0, 256, 128, 0, 1), "value": (128, 256, 16, 0, 256, 128, 0, 1),
            "num_heads": 1, "head_dim": 128, "block_tokens": 16, "dtype": "bfloat16",
            "is_neox": True, "theta": theta_of(pairs),
        }  # fmt: skip
        turns = rotator({**pages, **turning}, native)
        mover = TokenMover(turns, pairs)
        mover.words_at_once = 400
        moved = moved_table(
            MovedRun(0, 0, int(rng.integers(1, 17)), i, 0, int(rng.choice([0, 5, 5, 5, -7, i])))
            for i in range(900)
        )
        if alike:
            moved[:, 5] = 5
        parts = mover._parts(moved)
        assert np.array_equal(np.concatenate(parts), moved)
        sizes = [len(turns.table(part).words) for part in parts]
        assert max(sizes) <= 400
        assert np.mean(sizes) > 200


def test_a_move_without_a_rotation_is_a_bug(fake: FakeGpu) -> None:
    with pytest.raises(AssertionError, match="how K is rotated"):
        CudaRig(fake).engine.move(moves((0, 0, 1, 0, 0, 1)), ALL)
    assert rotation_of(ORDERS[0]).dtype == str(BF16).removeprefix("torch.")
