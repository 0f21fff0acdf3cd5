# SPDX-License-Identifier: Apache-2.0
"""CudaEngine over tests/fake_gpu.py, and over a GPU where there is one: bytes and their order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer import cuda_batches, cuda_tables
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.layout import describe
from tests.cuda_helpers import METHODS, Opens, Story, rigs
from tests.engine_helpers import (
    ALL,
    BLOCKS,
    LAYERS,
    ORDERS,
    PAGE_BYTES,
    ROWS,
    SLOTS,
    WITHIN,
    Rig,
    table,
)
from tests.fake_gpu import FakeGpu


@pytest.fixture
def open_rig(gpu: FakeGpu | None) -> Iterator[Opens]:
    yield from rigs(gpu)


all_orders = pytest.mark.parametrize("order", ORDERS, ids=str)
all_methods = pytest.mark.parametrize("method", METHODS)


# ---- the bytes -------------------------------------------------------------------------


@all_orders
def test_making_one_leaves_blocks_and_slots_as_they_were(
    open_rig: Opens, order: tuple[int, ...]
) -> None:
    """Though it has tried all its copies on the last of them."""
    before = Rig(order, None).hbm()
    rig = open_rig(order)
    assert np.array_equal(rig.hbm(), before)
    assert not rig.slots.any()


@all_orders
@all_methods
def test_every_copy_in_a_range_of_layers(
    open_rig: Opens, order: tuple[int, ...], method: str
) -> None:
    rig = open_rig(order, rules=METHODS[method])
    before = rig.hbm()
    some, layers = slice(1, 3), range(1, 3)
    pages, rows = table((3, 0, 5), (3, 1, 0), (6, 2, 23)), np.array([4, 0, 1])
    rig.save(pages, layers)
    wanted = np.zeros_like(rig.pages)
    for slot, within, block in pages:
        wanted[slot, some, within] = before[some, block]
    assert np.array_equal(rig.pages, wanted)
    rig.pages[:] = 0
    rig.engine.gather(pages, rows, layers)
    rig.compute(lambda: rig.overwrite(5))
    rig.engine.wait(rig.engine.drain(pages, rows, layers))
    assert np.array_equal(rig.pages, wanted)
    rig.load(table((3, 1, 9), (3, 0, 22)), layers)
    rig.settle()
    after = Rig(order, None)
    after.overwrite(5)
    left = after.hbm()
    left[some, 9], left[some, 22] = before[some, 0], before[some, 5]
    assert np.array_equal(rig.hbm(), left)


def test_ranks_have_their_own_part_of_a_slot(open_rig: Opens) -> None:
    for rank in range(2):
        rig = open_rig(num_ranks=2, rank=rank)
        rig.save(table((1, 2, 8)))
        parts = rig.slots[1, : 2 * rig.geometry.rank_bytes].reshape(2, LAYERS, WITHIN, PAGE_BYTES)
        assert np.array_equal(parts[rank, :, 2], rig.hbm()[:, 8])
        assert not parts[1 - rank].any()


@pytest.mark.parametrize(
    ("page", "layers"),
    [
        ((SLOTS, 0, 0), ALL), ((0, WITHIN, 0), ALL), ((0, 0, BLOCKS), ALL), ((0, 0, -1), ALL),
        ((0, 0, 0), range(LAYERS + 1)), ((0, 0, 0), range(-1, 1)), ((0, 0, 0), range(2, 1)),
    ],
    ids=str,
)  # fmt: skip
@all_methods
def test_what_does_not_exist_is_refused_before_anything_moves(
    open_rig: Opens, page: tuple[int, int, int], layers: range, method: str
) -> None:
    """And what is copied with the same pages after it is right: its table was not staged."""
    rig = open_rig(rules=METHODS[method])
    before = rig.hbm()
    good = table((0, 0, 0), (1, 1, 1), (2, 2, 2))
    bad, rows = good.copy(), np.arange(3)
    bad[1] = page
    for attempt in (rig.engine.save, rig.engine.load):
        with pytest.raises(IndexError, match="does not exist"):
            attempt(bad, layers)
    for of_rows in (rig.engine.gather, rig.engine.drain):
        with pytest.raises(IndexError, match="does not exist"):
            of_rows(bad, rows, layers)
        with pytest.raises(IndexError, match="does not exist"):
            of_rows(good, np.array([0, ROWS, 1]), ALL)
    rig.settle()
    assert not rig.slots.any()
    assert np.array_equal(rig.hbm(), before)
    rig.engine.gather(good, rows, ALL)
    rig.engine.wait(rig.engine.drain(good, rows, ALL))
    for i in range(3):
        assert np.array_equal(rig.pages[i, :, i], before[:, i])


# ---- the order -------------------------------------------------------------------------


@all_methods
def test_a_save_sees_what_the_model_has_left(open_rig: Opens, method: str) -> None:
    rig = open_rig(rules=METHODS[method])
    before = rig.hbm()
    for _ in range(9):
        rig.compute(lambda: rig.overwrite(5))
    rig.save(table((0, 0, 5)))
    assert np.array_equal(rig.pages[0, :, 0].view(np.int16), before[:, 5].view(np.int16) + 9)


@pytest.mark.parametrize("seed", range(12))
def test_what_keeps_the_rules_is_as_if_nothing_overlapped(open_rig: Opens, seed: int) -> None:
    rig = open_rig(ORDERS[seed % 4], rules=list(METHODS.values())[seed % 2])
    if rig.gpu is not None:
        rig.gpu.set(seed=seed)
    Story(rig, seed).run(300)


def test_a_table_is_not_overwritten_while_a_copy_may_read_it(
    open_rig: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring that has room for three tables."""
    monkeypatch.setattr(cuda_tables, "_RING_WORDS", 30)
    monkeypatch.setattr(cuda_tables.TableRing.__init__, "__defaults__", (30,))
    rig = open_rig(rules=METHODS["kernel"])
    rng = np.random.default_rng(5)
    rig.pages[:] = rng.integers(0, 256, rig.pages.shape, np.uint8)
    wanted = rig.hbm()
    for i in range(60):
        pages = table(
            *(
                (int(rng.integers(SLOTS)), int(rng.integers(WITHIN)), (3 * i + k) % BLOCKS)
                for k in range(3)
            )
        )
        for layer in ALL:
            rig.engine.load(pages, range(layer, layer + 1))
        for slot, within, block in pages:
            wanted[:, block] = rig.pages[slot, :, within]
    rig.settle()
    assert np.array_equal(rig.hbm(), wanted)


def test_more_pages_than_a_table_has(open_rig: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_batches, "PAGES_AT_ONCE", 4)
    rig = open_rig(rules=METHODS["kernel"])
    before = rig.hbm()
    rig.save(table(*((i // WITHIN, i % WITHIN, i) for i in range(18))))
    for i in range(18):
        assert np.array_equal(rig.pages[i // WITHIN, :, i % WITHIN], before[:, i])


def test_no_call_of_the_driver_has_more_runs_than_it_is_fast_with(open_rig: Opens) -> None:
    """A call of 32,768 runs takes twice as long for each as one of 1,024."""
    rig = open_rig(rules=METHODS["dma"])
    if rig.gpu is None:
        pytest.skip("it is counted by the fake driver")
    before = rig.hbm()
    rig.save(table(*((slot, 0, slot) for slot in range(SLOTS))))
    rig.gpu.set(batch_max=1_024)
    pages = table(*((i % SLOTS, 0, SLOTS + i % SLOTS) for i in range(2_000)))
    load = rig.engine.load(pages, ALL)
    rig.settle()
    assert load.done() and np.array_equal(rig.hbm()[:, SLOTS : 2 * SLOTS], before[:, :SLOTS])


def test_close_completes_what_is_in_flight(open_rig: Opens) -> None:
    rig = open_rig()
    before = rig.hbm()
    events = [rig.engine.save(table((slot, 0, slot)), ALL) for slot in range(5)]
    rig.engine.close()
    rig.engine.close()
    assert all(event.done() for event in events)
    for slot in range(5):
        assert np.array_equal(rig.pages[slot, :, 0], before[:, slot])
    assert rig.gpu is None or not rig.gpu.registered


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    rig = Rig(ORDERS[0], None)
    layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(rig.layers)]
    where = (rig.slots.ctypes.data, SLOTS, 0, rig.geometry, layouts)
    with pytest.raises(UnsupportedError, match=r"NVIDIA's driver is not here|sees no CUDA device"):
        CudaEngine(*where, torch.device("cuda", 0), ROWS)
    assert not rig.slots.any()
