# SPDX-License-Identifier: Apache-2.0
"""When saves are gathered, drained and over, with copies that go on only when the test says so.

Goal: a slot gets the bytes that its blocks had when they were computed, whoever gets the blocks
after that; a row is used again only when it has been read; what became of a save is said once.

It is long since one bench serves all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from attnstore_lab.testing.memory_engine import SteppedStream
from attnstore_vllm.errors import CopyError
from attnstore_vllm.transfer.plan import ChunkCopy, TransferPlan, pages
from attnstore_vllm.transfer.worker_copies import Saves
from tests.engine_helpers import ALL, LAYERS, ORDERS, ROWS, Bytes, Rig

Plans = Sequence[TransferPlan]


class Told(NamedTuple):
    """What a step says."""

    finished: list[int]
    given_up: list[int]
    freed: set[str]


NOTHING = Told([], [], set())


class Bench(Rig):
    """A write buffer of ROWS rows; as many blocks may wait for one. Slots are full of zeros."""

    def __init__(self, *, has_buffer: bool = True, layers_a_save: int = 1) -> None:
        self.stream = SteppedStream()
        super().__init__(ORDERS[2], (SteppedStream(), self.stream) if has_buffer else None)
        self.saves = Saves(self.engine, LAYERS, ROWS, layers_a_save)

    def content(self, plan: TransferPlan) -> Bytes:
        """[layer, block, byte]: what its blocks have."""
        return self.hbm()[:, [block for _, _, block in pages(plan.copies)]]

    def stored(self, plan: TransferPlan) -> Bytes:
        """[layer, block, byte]: what its slots have."""
        return np.stack([self.pages[slot, :, at] for slot, at, _ in pages(plan.copies)], axis=1)

    def others_write(self, plans: Plans) -> None:
        for plan in plans:
            for _, _, block in pages(plan.copies):
                self.overwrite(block)

    def step(
        self, before: Plans = (), after: Plans = (), *, preempted: Plans = (),
        finished: Plans = (), taken: Plans = (), computes: Plans | None = None,
        hooks: Sequence[int] = ALL, by_layer: bool = True,
    ) -> Told:  # fmt: skip
        """A whole one. Others write to the blocks that they have taken.

        Args:
            preempted, finished: any plan of the request will do.
            computes: its blocks are written; None: those of `after`.
            hooks: layers whose hook is called, as often as they are in it.
        """
        ids = [plan.request_id for plan in preempted]
        self.saves.begin_step(before, after, ids, by_layer=by_layer)
        self.others_write(taken)
        for layer in ALL:
            for plan in after if computes is None else computes:
                for _, _, block in pages(plan.copies):
                    self.layers[layer][block] += 1
            for _ in range(hooks.count(layer)):
                self.saves.layer_computed(layer)
        self.saves.end_step([plan.request_id for plan in finished])
        return Told(*self.saves.take_finished(), self.saves.take_freed())

    def go_on(self, pieces: int | None = None) -> None:
        """Carry out so many, or all, of those that are pending."""
        pending = self.stream.pending
        self.stream.step(pending if pieces is None else min(pieces, pending))

    def check_rows(self) -> None:
        """All rows are free: a save that takes all of them finds them."""
        self.stream.step(self.stream.pending)
        self.saves.end_step([])
        self.saves.begin_step([save(99, *range(ROWS))], [], [], by_layer=False)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def save(number: int, *blocks: int) -> TransferPlan:
    """Of two chunks, if it has more than three blocks."""
    chunks = [ChunkCopy(number % 7, 0, blocks[:3]), ChunkCopy((number + 1) % 7, 0, blocks[3:])]
    return TransferPlan(number, f"request {number}", tuple(c for c in chunks if c.block_ids))


def test_blocks_that_have_changed_hands(bench: Bench) -> None:
    """They are overwritten in the very step that is told of them."""
    plans = [save(0, 4, 5), save(1, 9, 10, 11)]
    wanted = [bench.content(plan) for plan in plans]
    assert bench.step(before=plans, taken=plans) == NOTHING
    assert bench.stream.pending == LAYERS
    bench.go_on()
    assert bench.step() == Told([0, 1], [], set())
    assert all(np.array_equal(bench.stored(p), w) for p, w in zip(plans, wanted, strict=True))
    assert bench.step() == NOTHING
    bench.check_rows()


@pytest.mark.parametrize(
    ("by_layer", "hooks"),
    [
        (True, (0, 1, 2)), (True, ()), (True, (0,)), (True, (0, 1)), (True, (1, 2)), (True, (0, 2)),
        (False, ()), (False, (0, 0, 1, 1, 2, 2)),
    ],
)  # fmt: skip
def test_what_the_step_computes(bench: Bench, by_layer: bool, hooks: tuple[int, ...]) -> None:
    """Whichever hooks are called: each layer is saved after it was computed, and only once."""
    plans = [save(0, 4, 5), save(1, 9, 10, 11)]
    assert bench.step(after=plans, hooks=hooks, by_layer=by_layer) == NOTHING
    wanted = [bench.content(plan) for plan in plans]
    assert bench.step(taken=plans) == NOTHING
    bench.go_on()
    assert bench.step() == Told([0, 1], [], set())
    assert all(np.array_equal(bench.stored(p), w) for p, w in zip(plans, wanted, strict=True))
    assert bench.step() == NOTHING
    bench.check_rows()


def test_a_layer_leaves_as_soon_as_it_is_computed(bench: Bench) -> None:
    plan = save(0, 4, 5)
    wanted = bench.content(plan)
    bench.saves.begin_step([], [plan], [], by_layer=True)
    for layer in ALL:
        bench.saves.layer_computed(layer)
        bench.go_on()
        assert np.array_equal(bench.stored(plan)[: layer + 1], wanted[: layer + 1])
        assert not bench.stored(plan)[layer + 1 :].any()
    bench.saves.end_step([])
    assert bench.saves.take_finished() == ([0], [])


@pytest.mark.parametrize("layers_a_save", range(1, LAYERS + 2))
@pytest.mark.parametrize("hooks", [(0, 1, 2), (), (0,), (0, 1), (1, 2), (0, 2), (0, 0, 1, 2)])
def test_layers_leave_together(layers_a_save: int, hooks: tuple[int, ...]) -> None:
    """When so many are computed, or all; what no hook tells of leaves behind the pass."""
    bench = Bench(layers_a_save=layers_a_save)
    plan = save(0, 4, 5)
    wanted = bench.content(plan)
    bench.saves.begin_step([], [plan], [], by_layer=True)
    computed = 0
    for layer in hooks:
        bench.saves.layer_computed(layer)
        computed += layer == computed
        left = computed if computed == LAYERS else computed // layers_a_save * layers_a_save
        bench.go_on()
        assert np.array_equal(bench.stored(plan)[:left], wanted[:left])
        assert not bench.stored(plan)[left:].any(), "a layer leaves before it is computed"
    bench.saves.end_step([])
    bench.go_on()
    assert np.array_equal(bench.stored(plan), wanted)
    assert bench.step() == Told([0], [], set())
    bench.check_rows()


def test_a_save_is_over_with_its_last_piece(bench: Bench) -> None:
    plan = save(0, 4, 5)
    assert bench.step(after=[plan]) == NOTHING
    for _ in range(LAYERS - 1):
        bench.go_on(1)
        assert bench.step() == NOTHING
    bench.go_on(1)
    assert bench.step() == Told([0], [], set())


def test_who_waits_for_rows_keeps_its_blocks(bench: Bench) -> None:
    """In the order in which they came, also where a later one would fit."""
    first, second, third = save(0, 4, 5, 6), save(1, 9, 10, 11), save(2, 15)
    bench.step(after=[first])
    assert bench.step(after=[second, third], finished=[first]) == Told([], [], {"request 0"})
    wanted = [bench.content(plan) for plan in (second, third)]
    assert bench.step(taken=[first], finished=[third, second]) == NOTHING
    bench.go_on(LAYERS - 1)
    assert bench.step() == NOTHING
    bench.go_on()
    assert bench.step() == Told([0], [], {"request 1", "request 2"})
    bench.others_write([second, third])
    bench.go_on()
    assert bench.step() == Told([1, 2], [], set())
    assert np.array_equal(bench.stored(second), wanted[0])
    assert np.array_equal(bench.stored(third), wanted[1])
    bench.check_rows()


def test_a_request_that_has_nothing_in_the_queue_is_freed_once(bench: Bench) -> None:
    plans = [save(0, 4), save(1, 9)]
    assert bench.step(after=plans[:1], finished=plans) == Told([], [], {"request 0", "request 1"})
    assert bench.step() == NOTHING


class Requests:
    """As scheduler/open_plans.py and vLLM do it: who ends gives its blocks away at once if all open
    saves are sure of rows, else when the worker says so. They are overwritten in the next step."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.wanted: dict[int, Bytes] = {}
        self.num_kept = 0
        self._open: dict[int, TransferPlan] = {}
        self._kept: dict[str, Plans] = {}
        self._taken: list[TransferPlan] = []
        self.finished: list[int] = []

    def computes(self, plan: TransferPlan) -> None:
        self._open[plan.plan_id] = plan
        self._step(after=[plan])
        self.wanted[plan.plan_id] = self.bench.content(plan)

    def ends(self, plan: TransferPlan, tail: TransferPlan) -> None:
        self._open[tail.plan_id] = tail
        self.wanted[tail.plan_id] = self.bench.content(tail)
        if sum(p.num_blocks for p in self._open.values()) <= ROWS:
            self._taken += [plan, tail]
            self._step(before=[tail])
        else:
            self.num_kept += 1
            self._kept[plan.request_id] = [plan, tail]
            self._step(after=[tail], computes=[], finished=[plan])

    def settle(self) -> None:
        for _ in range(2 * len(self.wanted)):
            self.bench.go_on()
            self._step()

    def _step(
        self,
        before: Plans = (),
        after: Plans = (),
        finished: Plans = (),
        computes: Plans | None = None,
    ) -> None:
        taken, self._taken = self._taken, []
        said = self.bench.step(before, after, finished=finished, taken=taken, computes=computes)
        assert not said.given_up
        for plan_id in said.finished:
            del self._open[plan_id]
        self.finished += said.finished
        for request_id in said.freed:
            self._taken += self._kept.pop(request_id)

    def check(self) -> None:
        assert not self._open and not self._kept
        assert sorted(self.finished) == sorted(self.wanted)
        self.bench.check_rows()


def test_requests_that_end_one_after_the_other() -> None:
    """With every number of pieces carried out after each step."""
    plans = [save(0, 4, 5), save(1, 9, 10), save(2, 12, 13, 14)]
    tails = [
        TransferPlan(p.plan_id + 3, p.request_id, save(p.plan_id + 3, 20 + p.plan_id).copies)
        for p in plans
    ]
    num_kept = 0
    for pieces in product((0, 1, LAYERS), repeat=2 * len(plans) - 1):
        requests, counts = Requests(), iter((*pieces, LAYERS))
        for plan, tail in zip(plans, tails, strict=True):
            requests.computes(plan)
            requests.bench.go_on(next(counts))
            requests.ends(plan, tail)
            requests.bench.go_on(next(counts))
        requests.settle()
        for plan in (*plans, *tails):
            wanted = requests.wanted[plan.plan_id]
            assert np.array_equal(requests.bench.stored(plan), wanted), (pieces, plan)
        requests.check()
        num_kept += requests.num_kept
    assert 0 < num_kept < 3 ** (2 * len(plans) - 1) * len(plans)


def test_blocks_are_not_given_away_before_there_are_rows(bench: Bench) -> None:
    bench.step(after=[save(0, 4, 5, 6)])
    with pytest.raises(AssertionError, match="before there were rows"):
        bench.step(before=[save(1, 9, 10, 11)])


@pytest.mark.parametrize("pieces", range(LAYERS))
def test_who_is_preempted_loses_what_is_queued(bench: Bench, pieces: int) -> None:
    """And nothing else: others' saves, and those of it that have their rows, go on."""
    mine, others = save(0, 4, 5), save(1, 9, 10)
    queued = TransferPlan(2, mine.request_id, save(2, 12, 13, 14).copies)
    behind = save(3, 16, 17)
    bench.step(after=[mine, others, queued])
    wanted = {p.plan_id: bench.content(p) for p in (mine, others)}
    bench.step(after=[behind])
    wanted[3] = bench.content(behind)
    bench.go_on(pieces)
    assert bench.step(preempted=[mine], taken=[mine, queued]) == Told([], [2], set())
    bench.go_on()
    assert bench.step() == Told([0, 1], [], set())
    bench.go_on()
    assert bench.step() == Told([3], [], set())
    assert all(np.array_equal(bench.stored(p), wanted[p.plan_id]) for p in (mine, others, behind))
    assert not bench.stored(queued).any()
    bench.check_rows()


def test_what_was_preempted_may_be_saved_anew_in_the_same_step(bench: Bench) -> None:
    bench.step(after=[save(0, 4, 5, 6)])
    old = TransferPlan(1, "request 1", save(1, 9, 10, 11).copies)
    bench.step(after=[old])
    bench.go_on()
    new = TransferPlan(2, "request 1", save(2, 12, 13).copies)
    assert bench.step(preempted=[old], taken=[old], after=[new]) == Told([0], [1], set())
    wanted = bench.content(new)
    bench.go_on()
    assert bench.step() == Told([2], [], set())
    assert np.array_equal(bench.stored(new), wanted)


def test_the_queue_has_a_limit(bench: Bench) -> None:
    """The newest are given up; their requests are free then."""
    first, second, third = save(0, 4, 5, 6), save(1, 9, 10, 11), save(2, 12, 13, 14)
    fourth = save(3, 16, 17)
    bench.step(after=[first])
    said = bench.step(after=[second, third, fourth], finished=[second, third, fourth])
    assert said == Told([], [3, 2], {"request 2", "request 3"})
    wanted = bench.content(second)
    bench.go_on()
    assert bench.step(taken=[third, fourth]) == Told([0], [], {"request 1"})
    bench.go_on()
    assert bench.step() == Told([1], [], set())
    assert np.array_equal(bench.stored(second), wanted)
    assert not bench.stored(third).any() and not bench.stored(fourth).any()
    bench.check_rows()


@pytest.mark.parametrize("fails", list(product((False, True), repeat=LAYERS)), ids=str)
def test_pieces_that_fail(bench: Bench, fails: tuple[bool, ...]) -> None:
    """Its rows are free when all its pieces are over: one that has not failed may still read."""
    first, second = save(0, 4, 5, 6), save(1, 9, 10, 11)
    bench.step(after=[first, second])
    wanted = [bench.content(plan) for plan in (first, second)]
    for number, is_bad in enumerate(fails):
        assert bench.stream.pending == LAYERS - number, "rows are used again too early"
        if is_bad:
            bench.stream.fail_next(CopyError("injected"))
        bench.go_on(1)
        if number < LAYERS - 1:
            assert bench.step() == NOTHING
    assert bench.step() == (Told([], [0], set()) if any(fails) else Told([0], [], set()))
    for layer, is_bad in enumerate(fails):
        found = bench.stored(first)[layer]
        assert np.array_equal(found, wanted[0][layer]) if not is_bad else not found.any()
    bench.go_on()
    assert bench.step() == Told([1], [], set())
    assert np.array_equal(bench.stored(second), wanted[1])
    bench.check_rows()


def test_without_a_write_buffer() -> None:
    """Blocks are read until their saves are over, which the step waits for."""
    bench = Bench(has_buffer=False)
    before, after = save(0, 4, 5), save(1, 9, 10)
    wanted = bench.content(before)
    said = bench.step(before=[before], after=[after], taken=[before], finished=[after])
    assert said == Told([0, 1], [], {"request 1"})
    assert np.array_equal(bench.stored(before), wanted)
    assert np.array_equal(bench.stored(after), bench.content(after))


def test_close_completes_what_has_left_its_blocks() -> None:
    for fails in (False, True):
        bench = Bench()
        plans = [save(0, 4, 5), save(1, 9, 10)]
        for plan in plans:
            bench.step(after=[plan])
        if fails:
            bench.stream.fail_next(CopyError("injected"))
        bench.saves.close()
        assert bench.stream.pending == 0
        assert np.array_equal(bench.stored(plans[1]), bench.content(plans[1]))


def test_a_fleeting_save_is_made_in_its_step_or_never(bench: Bench) -> None:
    """Its blocks are others' in the next step: what has no rows by then is given up."""
    first = save(0, *range(ROWS))
    late = TransferPlan(1, "request 1", save(3, 20, 21).copies, is_fleeting=True)
    told = bench.step(after=[first, late])
    assert told == Told([], [1], set())
    assert bench.step(taken=[late]) == NOTHING
    bench.go_on()
    assert bench.step() == Told([0], [], set())
    assert not bench.stored(late).any(), "it was read when its blocks were others'"
    bench.check_rows()


def test_before_a_sleep_all_is_read(bench: Bench) -> None:
    """From complete() on the device's memory may be gone; what became of the save is told later."""
    plan = save(0, 4, 5)
    wanted = bench.content(plan)
    assert bench.step(before=[plan]) == NOTHING
    assert bench.stream.pending
    bench.saves.complete()
    assert not bench.stream.pending
    bench.others_write([plan])
    assert bench.step() == Told([plan.plan_id], [], set())
    assert np.array_equal(bench.stored(plan), wanted)
    bench.check_rows()
