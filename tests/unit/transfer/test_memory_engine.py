# SPDX-License-Identifier: Apache-2.0
"""Slow and stepped copies: when bytes are read and written, what events say, and who waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from attnstore_lab.testing.memory_engine import (
    POISON,
    SteppedStream,
    ThrottledStream,
)
from attnstore_vllm.errors import CopyError
from tests.engine_helpers import ALL, BLOCKS, LAYERS, ORDERS, PAGE_BYTES, ROWS, Rig, table

SLACK_S = 0.3  # what a busy machine may be late


class Stepped(Rig):
    """Its engine and both streams; poison only where it is asked for."""

    def __init__(self, poison: bool = False, order: tuple[int, ...] = ORDERS[2]) -> None:
        self.loads, self.saves = SteppedStream(), SteppedStream()
        super().__init__(order, (self.loads, self.saves), poison=poison)
        assert self.engine.overlaps and self.engine.num_rows == ROWS


@pytest.fixture
def rig() -> Stepped:
    return Stepped()


class Throttled(Rig):
    def __init__(self, bytes_per_s: float, **options: Any) -> None:
        self.loads, self.saves = ThrottledStream(bytes_per_s), ThrottledStream(bytes_per_s)
        super().__init__(ORDERS[0], (self.loads, self.saves), **options)


@pytest.fixture
def stream() -> Iterator[ThrottledStream]:
    stream = ThrottledStream(math.inf)
    yield stream
    stream.close()


def test_nothing_moves_before_its_step(rig: Stepped) -> None:
    before = rig.hbm()
    saves = [rig.engine.save(table((slot, 0, slot)), ALL) for slot in range(3)]
    for i, event in enumerate(saves):
        assert rig.saves.pending == 3 - i
        assert not event.done()
        assert not rig.pages[i].any()
        rig.saves.step()
        assert event.done()
        assert np.array_equal(rig.pages[i, :, 0], before[:, i])
    assert not rig.pages[3:].any()
    loads = [rig.engine.load(table((slot, 0, 20 + slot)), ALL) for slot in range(3)]
    assert np.array_equal(rig.hbm(), before)
    rig.loads.step(2)
    assert [event.done() for event in loads] == [True, True, False]
    before[:, 20:22] = before[:, 0:2]
    assert np.array_equal(rig.hbm(), before)
    assert rig.loads.forced == rig.saves.forced == 0
    with pytest.raises(AssertionError, match="only 1"):
        rig.loads.step(2)


def test_sources_are_read_when_a_copy_is_carried_out(rig: Stepped) -> None:
    """So that who gives a source away too early sees it."""
    saved = rig.engine.save(table((0, 0, 4)), ALL)
    rig.overwrite(4)
    rig.saves.step()
    assert saved.done()
    assert np.array_equal(rig.pages[0, :, 0], rig.hbm()[:, 4])
    rig.engine.load(table((0, 0, 5)), ALL)
    rig.pages[0] = 3
    rig.loads.step()
    assert (rig.hbm()[:, 5] == 3).all()
    rows = np.array([2])
    rig.engine.gather(table((0, 0, 6)), rows, ALL)
    drained = rig.engine.drain(table((1, 0, 6)), rows, ALL)
    rig.engine.gather(table((0, 0, 7)), rows, ALL)  # into a row that has not left
    rig.saves.step()
    assert drained.done()
    assert np.array_equal(rig.pages[1, :, 0], rig.hbm()[:, 7])


def test_what_a_load_is_to_fill_may_be_overwritten_late(rig: Stepped) -> None:
    rig.pages[1] = 8
    rig.engine.load(table((1, 0, 5)), ALL)
    rig.overwrite(5)
    rig.loads.step()
    assert (rig.hbm()[:, 5] == 8).all()


def test_orders_are_read_when_they_are_given(rig: Stepped) -> None:
    """The caller may use its arrays again."""
    before = rig.hbm()
    rig.engine.gather(table((0, 0, 9)), np.array([1]), ALL)
    pages, rows = table((2, 1, 6)), np.array([1])
    rig.engine.save(pages, ALL)
    pages[:] = 0
    pages[:] = (3, 1, 6)
    rig.engine.drain(pages, rows, ALL)
    pages[:], rows[:] = 0, 0
    rig.saves.step(2)
    assert np.array_equal(rig.pages[2, :, 1], before[:, 6])
    assert np.array_equal(rig.pages[3, :, 1], before[:, 9])
    pages[:] = (2, 1, 11)
    rig.engine.load(pages, ALL)
    pages[:] = 0
    rig.loads.step()
    assert np.array_equal(rig.hbm()[:, 11], before[:, 6])


def test_loads_and_saves_do_not_wait_for_each_other(rig: Stepped) -> None:
    rig.pages[1] = 8
    saved, loaded = rig.engine.save(table((0, 0, 4)), ALL), rig.engine.load(table((1, 0, 4)), ALL)
    rig.engine.model_waits(loaded)
    assert not saved.done()
    assert (rig.loads.forced, rig.saves.forced) == (1, 0)
    rig.saves.step()
    assert (rig.pages[0, :, 0] == 8).all()


def test_who_waits_forces_what_comes_before_and_no_more(rig: Stepped) -> None:
    rig.pages[1] = 8
    events = [rig.engine.load(table((1, 0, block)), ALL) for block in range(4)]
    rig.loads.step()
    rig.engine.model_waits(events[0])
    assert rig.loads.forced == 0
    assert rig.engine.waited_s() == 0.0
    rig.engine.model_waits(events[2])
    assert [event.done() for event in events] == [True, True, True, False]
    assert rig.loads.forced == 2
    assert 0.0 < rig.engine.waited_s() < SLACK_S
    assert rig.engine.waited_s() == 0.0
    rig.engine.wait(events[3])
    assert rig.loads.forced == 3
    assert (rig.hbm()[:, 3] == 8).all()
    assert rig.engine.waited_s() == 0.0, "only the model's waits count"


def test_a_piece_fails_alone(rig: Stepped) -> None:
    before = rig.hbm()
    rig.pages[1] = 8
    events = [rig.engine.load(table((1, 0, block)), ALL) for block in range(3)]
    rig.loads.step()
    rig.loads.fail_next(CopyError("injected"))
    assert not events[1].done(), "it fails when it is carried out"
    for look in (rig.engine.model_waits, rig.engine.wait, rig.engine.model_waits):
        with pytest.raises(CopyError, match="injected"):
            look(events[1])
    with pytest.raises(CopyError, match="injected"):
        events[1].done()
    assert events[0].done()
    rig.loads.step()
    assert events[2].done()
    assert np.array_equal(rig.hbm()[:, 1], before[:, 1])
    assert (rig.hbm()[:, 2] == 8).all()
    assert [num_bytes for num_bytes, _ in rig.engine.measured()] == [LAYERS * PAGE_BYTES] * 2


def test_a_failure_in_close_is_the_events(rig: Stepped) -> None:
    events = [rig.engine.save(table((slot, 0, slot)), ALL) for slot in range(2)]
    rig.saves.fail_next(CopyError("first"))
    rig.engine.close()
    with pytest.raises(CopyError, match="first"):
        events[0].done()
    assert events[1].done()
    assert rig.saves.forced == 0


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_poison_is_seen_until_a_load_is_over(order: tuple[int, ...]) -> None:
    rig = Stepped(poison=True, order=order)
    rig.pages[1] = 8
    before = rig.hbm()
    rig.engine.load(table((1, 0, 5), (1, 1, 9)), range(1, 3))
    before[1:, [5, 9]] = POISON
    assert np.array_equal(rig.hbm(), before)
    rig.loads.step()
    before[1:, [5, 9]] = 8
    assert np.array_equal(rig.hbm(), before)
    with pytest.raises(IndexError):
        rig.engine.load(table((1, 0, 6), (1, 0, BLOCKS)), ALL)
    assert np.array_equal(rig.hbm(), before), "a refused load has written poison"


def test_an_event_is_not_done_while_its_piece_is_carried_out(stream: ThrottledStream) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(10)

    before, event = stream.submit(lambda: None, 1), stream.submit(work, 1)
    later = stream.submit(lambda: None, 1)
    assert begun.wait(10)
    assert before.done()
    assert not event.done()
    with pytest.raises(CopyError, match="not over after"):
        event.wait(0.05)
    assert not later.done()
    assert stream.pending == 2
    may_end.set()
    later.wait(10)
    assert event.done()


def test_a_stepped_event_is_not_done_while_its_piece_is_carried_out() -> None:
    seen: list[bool] = []
    stream = SteppedStream()
    event = stream.submit(lambda: seen.append(event.done()), 1)
    event.wait(0.0)
    assert seen == [False]
    assert event.done()


def test_bytes_are_there_when_an_event_says_so() -> None:
    """Looked at from another thread than that which copies, as soon as it says so."""
    rig = Throttled(math.inf)
    for value in range(60):
        rig.pages[0, :, 0] = value
        event = rig.engine.load(table((0, 0, 3)), ALL)
        while not event.done():
            pass
        assert (rig.hbm()[:, 3] == value).all()
    rig.engine.close()


def test_throttled_copies_move_late_and_the_model_waits() -> None:
    page_s = 0.2
    rig = Throttled(LAYERS * PAGE_BYTES / page_s)
    before = rig.hbm()
    began = time.monotonic()
    rig.pages[1] = 8
    loaded, saved = rig.engine.load(table((1, 0, 5)), ALL), rig.engine.save(table((0, 0, 4)), ALL)
    rig.pages[1] = 9
    rig.overwrite(4)
    assert np.array_equal(rig.hbm()[:, 5], before[:, 5])
    rig.engine.model_waits(loaded)
    took = time.monotonic() - began
    assert (rig.hbm()[:, 5] == 9).all()
    assert page_s <= took < page_s + SLACK_S
    assert page_s / 2 < rig.engine.waited_s() <= took
    rig.engine.wait(saved)
    assert time.monotonic() - began < 1.5 * page_s + SLACK_S, "the streams run side by side"
    assert np.array_equal(rig.pages[0, :, 0], rig.hbm()[:, 4])
    assert rig.engine.waited_s() == 0.0
    ((num_bytes, seconds),) = rig.engine.measured()
    assert num_bytes == LAYERS * PAGE_BYTES
    assert page_s <= seconds <= took
    assert rig.engine.measured() == []
    rig.engine.close()


def test_a_throttle_keeps_its_rate() -> None:
    """Of pieces in a row, of one after a pause, and of one after a change of the rate."""
    num_bytes, piece_s, count = LAYERS * PAGE_BYTES, 0.04, 20
    rig = Throttled(num_bytes / piece_s)
    began = time.monotonic()
    events = [rig.engine.load(table((0, 0, block)), ALL) for block in range(count)]
    for i, event in enumerate(events):
        rig.engine.wait(event)
        assert time.monotonic() - began >= (i + 1) * piece_s
    took = time.monotonic() - began
    assert took < 1.5 * count * piece_s + SLACK_S
    rig.engine.wait(rig.engine.save(table((0, 0, 1), (0, 1, 2)), ALL))
    # Meanwhile no load was begun, and for that pause nobody gets credit.
    began = time.monotonic()
    rig.engine.wait(rig.engine.load(table((0, 0, 1), (0, 1, 2)), ALL))
    assert 2 * piece_s <= time.monotonic() - began < 3 * piece_s + SLACK_S
    rig.loads.bytes_per_s = num_bytes / 0.2
    began = time.monotonic()
    rig.engine.wait(rig.engine.load(table((0, 0, 1)), ALL))
    assert 0.2 <= time.monotonic() - began < 1.5 * 0.2 + SLACK_S
    measured = rig.engine.measured()
    assert [n // num_bytes for n, _ in measured] == [1] * count + [2, 1]
    worked_s = [seconds for _, seconds in measured]
    assert min(worked_s) > 0.0
    assert count * piece_s <= sum(worked_s[:count]) <= took, "no wait for what was before"
    assert 2 * piece_s <= worked_s[-2] < 3 * piece_s + SLACK_S
    assert 0.2 <= worked_s[-1] < 1.5 * 0.2 + SLACK_S
    rig.engine.close()


def test_a_late_piece_makes_no_later_one_late(stream: ThrottledStream) -> None:
    """A busy processor does not make the rate lower."""
    stream.bytes_per_s = 10.0

    def late() -> None:
        assert not threading.Event().wait(0.6)

    began = time.monotonic()
    first = stream.submit(late, 1)
    events = [stream.submit(lambda: None, 1) for _ in range(5)]
    first.wait(10)
    assert time.monotonic() - began >= 0.6
    events[-1].wait(10)
    assert time.monotonic() - began < 0.7 + SLACK_S


def test_a_throttle_sleeps_and_never_blocks_its_caller() -> None:
    rig = Throttled(LAYERS * PAGE_BYTES / 0.5)
    began, cpu_began = time.monotonic(), time.process_time()
    first = rig.engine.save(table((0, 0, 4)), ALL)
    for _ in range(200):
        rig.engine.save(table((0, 0, 4)), ALL)
    assert time.monotonic() - began < 0.4, "the first of them takes longer"
    assert not first.done()
    assert rig.saves.pending == 201
    rig.engine.wait(first)
    assert time.process_time() - cpu_began < 0.1
    rig.engine.close()


def test_a_wait_has_a_deadline_and_close_drops_the_throttle() -> None:
    rig = Throttled(1.0, deadline_s=0.1)
    rig.pages[1] = 8
    before = rig.hbm()
    began = time.monotonic()
    events = [rig.engine.load(table((1, 0, block)), ALL) for block in range(3)]
    rig.engine.gather(table((0, 0, 7)), np.array([0]), ALL)
    events.append(rig.engine.drain(table((0, 0, 7)), np.array([0]), ALL))
    for wait in (rig.engine.model_waits, rig.engine.wait):
        with pytest.raises(CopyError, match=r"not over after 0\.1 s"):
            wait(events[0])
    assert 0.1 <= rig.engine.waited_s() < 0.1 + SLACK_S
    assert not any(event.done() for event in events)
    rig.loads.fail_next(CopyError("injected"))
    rig.engine.close()
    assert 0.2 <= time.monotonic() - began < 0.2 + SLACK_S
    with pytest.raises(CopyError, match="injected"):
        events[0].done()
    assert all(event.done() for event in events[1:])
    before[:, 1:3] = 8
    assert np.array_equal(rig.hbm(), before)
    assert np.array_equal(rig.pages[0, :, 0], before[:, 7])
    with pytest.raises(AssertionError):
        rig.engine.save(table((0, 0, 4)), ALL)
