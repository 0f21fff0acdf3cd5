# SPDX-License-Identifier: Apache-2.0
"""Copy engines: the bytes that arrive are those that vLLM wrote, wherever they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from attnstore_lab.testing.memory_engine import SteppedStream, Stream, ThrottledStream
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

Opens = Callable[..., Rig]


@pytest.fixture(params=["cpu", "stepped", "throttled"])
def open_rig(request: pytest.FixtureRequest) -> Iterator[Opens]:
    rigs: list[Rig] = []

    def open_rig(order: tuple[int, ...] = ORDERS[2], **options: int) -> Rig:
        streams: dict[str, Callable[[], tuple[Stream, Stream] | None]] = {
            "cpu": lambda: None,
            "stepped": lambda: (SteppedStream(), SteppedStream()),
            "throttled": lambda: (ThrottledStream(math.inf), ThrottledStream(math.inf)),
        }
        rigs.append(Rig(order, streams[request.param](), **options))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.engine.close()


with_a_write_buffer = pytest.mark.parametrize("open_rig", ["stepped", "throttled"], indirect=True)
all_orders = pytest.mark.parametrize("order", ORDERS, ids=str)


@all_orders
def test_what_was_saved_is_loaded_into_other_blocks(
    open_rig: Opens, order: tuple[int, ...]
) -> None:
    rig = open_rig(order)
    before = rig.hbm()
    saved = table((3, 0, 5), (3, 1, 0), (3, 2, 23), (6, 1, 12))
    rig.save(saved)
    assert np.array_equal(rig.hbm(), before)
    wanted = np.zeros_like(rig.pages)
    for slot, within, block in saved:
        wanted[slot, :, within] = before[:, block]
    assert np.array_equal(rig.pages, wanted)
    assert not rig.slots[:, rig.geometry.rank_bytes :].any()
    rig.load(table((3, 2, 9), (6, 1, 22), (3, 0, 10)))
    after = before.copy()
    after[:, [9, 22, 10]] = before[:, [23, 12, 5]]
    assert np.array_equal(rig.hbm(), after)
    assert np.array_equal(rig.pages, wanted)


@all_orders
@with_a_write_buffer
def test_what_was_gathered_and_drained_is_loaded(open_rig: Opens, order: tuple[int, ...]) -> None:
    """Once blocks are gathered, they may be overwritten."""
    rig = open_rig(order)
    assert rig.engine.num_rows == ROWS
    before = rig.hbm()
    first, second = table((1, 2, 20), (4, 0, 3)), table((1, 1, 20), (0, 0, 8), (5, 2, 0))
    rig.engine.gather(first, np.array([4, 1]), ALL)
    rig.overwrite(20)
    between = rig.hbm()
    rig.engine.gather(second, np.array([0, 3, 2]), ALL)
    for block in (20, 3, 8, 0):
        rig.overwrite(block)
    left = rig.hbm()
    for pages, rows in ((second, [0, 3, 2]), (first, [4, 1])):
        rig.engine.wait(rig.engine.drain(pages, np.array(rows), ALL))
    wanted = np.zeros_like(rig.pages)
    for pages, source in ((first, before), (second, between)):
        for slot, within, block in pages:
            wanted[slot, :, within] = source[:, block]
    assert np.array_equal(rig.pages, wanted)
    assert np.array_equal(rig.hbm(), left)
    rig.load(table((1, 2, 20), (1, 1, 21)))
    left[:, 20], left[:, 21] = before[:, 20], between[:, 20]
    assert np.array_equal(rig.hbm(), left)


@with_a_write_buffer
def test_rows_keep_their_bytes_until_they_are_gathered_into_again(open_rig: Opens) -> None:
    """Layer by layer, each into rows of which others leave meanwhile."""
    rig = open_rig()
    before = rig.hbm()
    pages = table(*((slot, 0, 10 + slot) for slot in range(ROWS)))
    rows = np.arange(ROWS)[::-1].copy()
    for layer in ALL:
        rig.engine.gather(pages, rows, range(layer, layer + 1))
    rig.engine.gather(table((6, 1, 2)), np.array([1]), range(1, 2))  # the row of slot 3
    for layer in ALL:
        rig.engine.wait(rig.engine.drain(pages, rows, range(layer, layer + 1)))
    wanted = np.zeros_like(rig.pages)
    for slot, within, block in pages:
        wanted[slot, :, within] = before[:, block]
    wanted[3, 1, 0] = before[1, 2]
    assert np.array_equal(rig.pages, wanted)


@all_orders
@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(1, 3), range(2, 2)], ids=str)
def test_a_range_of_layers(open_rig: Opens, order: tuple[int, ...], layers: range) -> None:
    """What is of other layers stays, in HBM and in the slots."""
    rig = open_rig(order)
    some = slice(layers.start, layers.stop)
    before = rig.hbm()
    wanted = np.zeros_like(rig.pages)
    rig.save(table((2, 1, 7)), layers)
    wanted[2, some, 1] = before[some, 7]
    assert np.array_equal(rig.pages, wanted)
    if rig.engine.num_rows:
        rig.engine.gather(table((0, 0, 6)), np.array([2]), layers)
        rig.overwrite(6)
        rig.engine.wait(rig.engine.drain(table((0, 0, 6)), np.array([2]), layers))
        wanted[0, some, 0] = before[some, 6]
        assert np.array_equal(rig.pages, wanted)
    rig.pages[:] = rig.pages + 1
    after = rig.hbm()
    rig.load(table((2, 1, 15), (3, 0, 14)), layers)
    after[some, 15] = wanted[2, some, 1] + 1
    after[some, 14] = 1
    assert np.array_equal(rig.hbm(), after)


def test_ranks_have_their_own_part_of_a_slot(open_rig: Opens) -> None:
    rigs = [open_rig(num_ranks=3, rank=rank, seed=rank) for rank in range(3)]
    for rank, rig in enumerate(rigs):
        if rig.engine.num_rows:
            rig.engine.gather(table((1, 2, 8)), np.array([0]), ALL)
            rig.engine.wait(rig.engine.drain(table((1, 2, 8)), np.array([0]), ALL))
            assert np.array_equal(rig.pages[1, :, 2], rig.hbm()[:, 8])
            rig.pages[:] = 0
        rig.save(table((1, 2, 8)))
        part = rig.slots[:, : 3 * rig.geometry.rank_bytes].reshape(SLOTS, 3, LAYERS, WITHIN, -1)
        assert np.array_equal(part[1, rank, :, 2], rig.hbm()[:, 8])
        part[1, rank, :, 2] = 0
        assert not rig.slots.any()
        rig.pages[:] = rank + 1
        rig.load(table((6, 2, 0)))
        assert (rig.hbm()[:, 0] == rank + 1).all()


@pytest.mark.parametrize(
    ("page", "layers"),
    [
        ((SLOTS, 0, 0), ALL), ((0, WITHIN, 0), ALL), ((0, 0, BLOCKS), ALL),
        ((-1, 0, 0), ALL), ((0, -1, 0), ALL), ((0, 0, -1), ALL),
        ((0, 0, 0), range(LAYERS + 1)), ((0, 0, 0), range(-1, 1)),
        ((0, 0, 0), range(LAYERS, LAYERS + 1)), ((0, 0, 0), range(2, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_exist_is_refused_before_anything_moves(
    open_rig: Opens, page: tuple[int, int, int], layers: range
) -> None:
    rig = open_rig()
    pages, rows = table((0, 0, 0), page, (1, 1, 1)), np.arange(3)
    rig.pages[1:3] = 1
    slots, before = rig.slots.copy(), rig.hbm()
    attempts: list[Callable[..., object]] = [rig.engine.save, rig.engine.load]
    if rig.engine.num_rows:
        attempts.append(lambda pages, layers: rig.engine.gather(pages, rows, layers))
        attempts.append(lambda pages, layers: rig.engine.drain(pages, rows, layers))
    for attempt in attempts:
        with pytest.raises(IndexError, match="does not exist"):
            attempt(pages, layers)
        rig.save(table())  # what may have been begun before it is over
        rig.load(table())
        assert np.array_equal(rig.slots, slots)
        assert np.array_equal(rig.hbm(), before)


@with_a_write_buffer
@pytest.mark.parametrize("row", [ROWS, -1])
def test_a_row_that_does_not_exist_is_refused(open_rig: Opens, row: int) -> None:
    rig = open_rig()
    pages, rows = table((0, 0, 0), (1, 1, 1), (2, 2, 2)), np.array([3, row, 0])
    before = rig.hbm()
    for attempt in (rig.engine.gather, rig.engine.drain):
        with pytest.raises(IndexError, match="does not exist"):
            attempt(pages, rows, ALL)
    good = np.array([3, 4, 0])
    rig.engine.wait(rig.engine.drain(pages, good, ALL))
    assert not rig.slots.any(), "the refused gather has written a row"
    assert np.array_equal(rig.hbm(), before)


def test_order_within_a_direction(open_rig: Opens) -> None:
    """Of two copies into one place the later one stays; when it is over, so is the earlier."""
    rig = open_rig()
    before = rig.hbm()
    first = rig.engine.save(table((0, 0, 1)), ALL)
    second = rig.engine.save(table((0, 0, 2), (0, 1, 1)), ALL)
    rig.engine.wait(second)
    assert first.done()
    assert np.array_equal(rig.pages[0, :, 0], before[:, 2])
    first = rig.engine.load(table((0, 0, 10)), ALL)
    second = rig.engine.load(table((0, 1, 10)), ALL)
    rig.engine.model_waits(second)
    assert first.done()
    assert np.array_equal(rig.hbm()[:, 10], before[:, 1])


def test_loads_are_measured_once(open_rig: Opens) -> None:
    rig = open_rig()
    rig.save(table((0, 0, 1)))
    assert rig.engine.measured() == []
    rig.load(table((0, 0, 1), (0, 1, 2)), range(1, 3))
    rig.load(table((0, 0, 3)))
    measured = rig.engine.measured()
    assert [num_bytes for num_bytes, _ in measured] == [4 * PAGE_BYTES, 3 * PAGE_BYTES]
    assert all(0.0 < seconds < 10.0 for _, seconds in measured)
    assert rig.engine.measured() == []


def test_close_completes_what_is_in_flight(open_rig: Opens) -> None:
    rig = open_rig()
    before = rig.hbm()
    rig.pages[5] = 9
    events = [rig.engine.save(table((slot, 0, slot)), ALL) for slot in range(5)]
    events += [rig.engine.load(table((5, 1, 10 + i)), ALL) for i in range(5)]
    rig.engine.close()
    assert all(event.done() for event in events)
    for i in range(5):
        assert np.array_equal(rig.pages[i, :, 0], before[:, i])
        assert (rig.hbm()[:, 10 + i] == 9).all()


@all_orders
def test_random_copies_against_a_model(open_rig: Opens, order: tuple[int, ...]) -> None:
    """The model is two arrays; each copy is one line of it."""
    rig = open_rig(order)
    hbm, slots = rig.hbm(), rig.pages.copy()
    rng = np.random.default_rng(3)
    for _ in range(60):
        count = int(rng.integers(1, ROWS + 1))
        places = rng.permutation(SLOTS * WITHIN)[:count]
        blocks = rng.permutation(BLOCKS)[:count]
        pages = np.stack([places // WITHIN, places % WITHIN, blocks], axis=1)
        start = int(rng.integers(LAYERS))
        layers = range(start, int(rng.integers(start, LAYERS)) + 1)
        rows = rng.permutation(ROWS)[:count]
        way = int(rng.integers(3 if rig.engine.num_rows else 2))
        if way == 0:
            rig.load(pages, layers)
        elif way == 1:
            rig.save(pages, layers)
        else:
            rig.engine.gather(pages, rows, layers)
            rig.engine.wait(rig.engine.drain(pages, rows, layers))
        for slot, within, block in pages:
            some = slice(layers.start, layers.stop)
            if way == 0:
                hbm[some, block] = slots[slot, some, within]
            else:
                slots[slot, some, within] = hbm[some, block]
        assert np.array_equal(rig.hbm(), hbm)
        assert np.array_equal(rig.pages, slots)
