# SPDX-License-Identifier: Apache-2.0
"""When loads are told, waited for and over, with copies that go on only when the test says so.

Goal: no layer is read before it is there, no block is given away while a copy may still write to
it, and what became of a load is said exactly once.
Method: each load is cut into pieces (a partly filled block in all layers, then a layer each); every
way to place them among the steps is played. Blocks hold poison from a load's beginning to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import pytest

from attnstore_lab.testing.memory_engine import POISON, SteppedStream
from attnstore_vllm.transfer import worker_copies
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, pages
from attnstore_vllm.transfer.worker_copies import Loads
from tests.engine_helpers import ALL, LAYERS, ORDERS, Rig

BLOCKS = (4, 5, 6)
"""Of the load that most tests look at."""
Places = tuple[int, ...]
"""How many pieces are over by the beginning of each step; then all others."""


class Ahead(NamedTuple):
    """A load ahead of its step."""

    partial: bool
    before: int

    @property
    def pieces(self) -> int:
        return LAYERS + self.partial

    @property
    def enough(self) -> int:
        """So many must be over before it is told."""
        return self.before + self.partial

    def plan(self) -> LoadPlan:
        return load(before=self.before, partial=self.partial)


AHEAD = [Ahead(partial, before) for partial in (False, True) for before in (1, 2, 3)]
every_load_ahead = pytest.mark.parametrize("ahead", AHEAD, ids=str)


class Told(NamedTuple):
    """What a step says."""

    received: set[str]
    failed: set[str]
    finished: list[int]


NOTHING = Told(set(), set(), [])


def places(pieces: int, steps: int) -> Iterator[Places]:
    """Every one."""
    return combinations_with_replacement(range(pieces + 1), steps)


class Bench(Rig):
    """Slots hold bytes that differ, and are never POISON."""

    def __init__(self) -> None:
        self.stream = SteppedStream()
        super().__init__(ORDERS[2], (self.stream, SteppedStream()), poison=True)
        random = np.random.default_rng(5)
        self.pages[:] = random.integers(0, POISON, self.pages.shape)
        self.loads = Loads(self.engine, LAYERS)
        self.begun = 0

    @property
    def over(self) -> int:
        """Pieces of all loads that are over."""
        return self.begun - self.stream.pending

    def go_on_to(self, pieces: int) -> None:
        """Until so many are over."""
        self.stream.step(max(0, pieces - self.over))

    def give_away(self) -> bytes:
        """Let another overwrite BLOCKS; returns their bytes."""
        for block in BLOCKS:
            self.overwrite(block)
        return self.blocks()

    def blocks(self) -> bytes:
        return self.hbm()[:, BLOCKS].tobytes()

    def is_there(self, plan: LoadPlan, layer: int) -> bool:
        hbm = self.hbm()
        return all(
            np.array_equal(hbm[layer, block], self.pages[slot, layer, within])
            for slot, within, block in pages(plan.copies)
        )

    def begin(self, *plans: LoadPlan, whole: bool = False) -> None:
        before = self.stream.pending + self.stream.forced
        self.loads.begin(plans, whole=whole)
        self.begun += self.stream.pending + self.stream.forced - before

    def forward(self, *reads: LoadPlan, hooks: Collection[int] = ALL) -> None:
        """A forward pass that reads the blocks of these."""
        for layer in ALL:
            if layer in hooks:
                self.loads.wait_layer(layer)
            for plan in reads:
                assert self.is_there(plan, layer), f"layer {layer} is read and is not there"

    def end_step(self) -> Told:
        self.loads.end_step()
        return Told(*self.loads.take_received(), self.loads.take_finished())

    def step(
        self,
        *begins: LoadPlan,
        ended: Collection[int] = (),
        whole: bool = False,
        reads: Sequence[LoadPlan] | None = None,
    ) -> Told:
        """A whole one; without `reads` it computes nothing."""
        self.loads.begin_step(ended, whole=whole)
        if reads is not None:
            self.forward(*reads, hooks=() if whole else ALL)
        self.begin(*begins)
        return self.end_step()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def load(
    number: int = 1,
    *,
    before: int,
    partial: bool = False,
    slot: int = 0,
    blocks: tuple[int, ...] = BLOCKS,
) -> LoadPlan:
    copies = [ChunkCopy(slot, 0, blocks)]
    if len(blocks) > 1:  # of two chunks
        copies = [ChunkCopy(slot, 1, blocks[:2]), ChunkCopy(slot + 1, 0, blocks[2:])]
    return LoadPlan(
        number, f"request {number}", tuple(c for c in copies if c.block_ids), partial, before
    )


# ---- ahead of the step -----------------------------------------------------------------


@every_load_ahead
def test_a_load_ahead_is_told_once_and_every_later_step_waits(ahead: Ahead) -> None:
    for at in places(ahead.pieces, 4):
        bench, plan = Bench(), ahead.plan()
        said = [bench.step(plan)]
        assert bench.begun == ahead.pieces
        reads = False
        for over in at:
            bench.go_on_to(over)
            is_enough = bench.over >= ahead.enough
            said.append(bench.step(reads=[plan] if reads else []))
            assert bool(said[-1].received) == (is_enough and not reads)
            if not is_enough:
                assert said[-1] == NOTHING
            if not reads:
                assert bench.stream.forced == 0, "a step waits for what nobody may read"
            reads = is_enough
        bench.go_on_to(ahead.pieces)
        said.append(bench.step())
        assert [s.received for s in said if s.received] == [{plan.request_id}]
        assert [s.finished for s in said if s.finished] == [[plan.plan_id]]
        assert not any(s.failed for s in said)
        assert bench.step() == NOTHING


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_step_waits_for_a_layer_when_it_reads_it(bench: Bench, steps: int) -> None:
    """In each step until all is there, also if those before computed nothing, or a part."""
    plan = load(before=1, partial=True)
    bench.step(plan)
    bench.go_on_to(2)
    assert bench.step().received
    for _ in range(steps - 1):
        assert bench.step() == NOTHING
    assert bench.over == 2
    bench.loads.begin_step((), whole=False)
    for layer in ALL:
        bench.loads.wait_layer(layer)
        assert bench.is_there(plan, layer)
        assert bench.over == 2 + layer, "it waits for more than this layer"
    assert bench.end_step().finished == [1]
    assert bench.engine.waited_s() > 0


def test_a_partly_filled_block_alone(bench: Bench) -> None:
    plan = load(before=3, partial=True, blocks=(9,))
    assert bench.step(plan) == NOTHING
    assert bench.begun == 1
    bench.go_on_to(1)
    assert bench.step() == Told({"request 1"}, set(), [1])


@every_load_ahead
def test_a_graph_that_calls_no_hook_waits_for_all_layers_first(ahead: Ahead) -> None:
    """For those of loads that were told."""
    for over in range(ahead.pieces + 1):
        bench, plan = Bench(), ahead.plan()
        bench.step(plan)
        bench.go_on_to(over)
        is_told = bool(bench.step().received)
        assert is_told == (over >= ahead.enough)
        bench.loads.begin_step((), whole=True)
        assert bench.over == (ahead.pieces if is_told else over)
        bench.forward(*([plan] if is_told else []), hooks=())
        bench.end_step()


@every_load_ahead
def test_a_load_whose_request_is_gone(ahead: Ahead) -> None:
    """It ends in each of the steps: nothing is written to its blocks once they may be others'.

    They are when the load was received, or else when it is said to be.
    """
    for ends in (1, 2, 3):
        for at in places(ahead.pieces, 3):
            bench, plan = Bench(), ahead.plan()
            said = [bench.step(plan)]
            others = None
            for number, over in enumerate(at, start=1):
                bench.go_on_to(over)
                was_told = any(s.received for s in said)
                before, forced = bench.over, bench.stream.forced
                bench.loads.begin_step([plan.plan_id] if number == ends else [], whole=False)
                if number == ends and was_told:
                    others = others or bench.give_away()
                bench.begin()
                said.append(bench.end_step())
                if number >= ends and said[-1].received:
                    others = others or bench.give_away()
                if number >= ends and not any(s.received for s in said):
                    assert (bench.over, bench.stream.forced) == (before, forced), "it is waited for"
            bench.go_on_to(ahead.pieces)
            said.append(bench.step())
            assert [s.received for s in said if s.received] == [{plan.request_id}]
            assert [s.finished for s in said if s.finished] == [[plan.plan_id]]
            others = others or bench.give_away()
            assert others == bench.blocks(), "a copy has written to a block that is another's"


def test_loads_ahead_are_told_in_the_order_in_which_they_come(bench: Bench) -> None:
    plans = [load(i, before=2, slot=2 * i, blocks=(3 * i, 3 * i + 1)) for i in (1, 2)]
    plans.append(load(3, before=1, blocks=(20, 21)))
    assert bench.step(*plans[:2]) == NOTHING
    assert bench.step(plans[2]) == NOTHING
    told = []
    for over in range(1, 3 * LAYERS + 1):
        bench.go_on_to(over)
        told.append(bench.step())
    assert bench.stream.forced == 0
    assert [(i + 1, s.received) for i, s in enumerate(told) if s.received] == [
        (2, {"request 1"}),
        (5, {"request 2"}),
        (7, {"request 3"}),
    ]
    assert [(i + 1, s.finished) for i, s in enumerate(told) if s.finished] == [
        (3, [1]),
        (6, [2]),
        (9, [3]),
    ]
    assert all(bench.is_there(plan, layer) for plan in plans for layer in ALL)


# ---- for the step ----------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_load_for_this_step(bench: Bench, hooks: tuple[int, ...]) -> None:
    """Layer by layer, but for partly filled blocks; and over with the step."""
    plans = [
        load(1, before=0, partial=True),
        load(2, before=0, slot=2, blocks=(10, 11, 12)),
        load(3, before=0, slot=4, blocks=(15, 16), partial=True),
        load(4, before=0, slot=5, blocks=(17,), partial=True),
    ]
    ahead = load(5, before=1, slot=5, blocks=(20, 21))
    bench.loads.begin_step((), whole=False)
    bench.begin(*plans[:2], ahead, *plans[2:])
    assert bench.begun == 1 + 2 * LAYERS
    assert bench.over == 1
    hbm = bench.hbm()
    for block, (slot, within) in {6: (1, 0), 16: (4, 2), 17: (5, 0)}.items():
        assert np.array_equal(hbm[:, block], bench.pages[slot, :, within])
    for layer in hooks:
        bench.loads.wait_layer(layer)
        assert bench.over == 2 + layer
        assert all(bench.is_there(plan, layer) for plan in plans)
    assert bench.end_step() == Told(set(), set(), [1, 2, 3, 4])
    assert bench.over == 1 + LAYERS, "it waits for the load ahead"
    assert all(bench.is_there(plan, layer) for plan in plans for layer in ALL)
    assert bench.loads.take_times()[0] > 0
    bench.go_on_to(bench.begun)
    assert bench.step() == Told({"request 5"}, set(), [5])


def test_layers_are_given_some_before_they_are_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give them all first holds up the forward pass."""
    monkeypatch.setattr(worker_copies, "LAYERS_BEFORE_PASS", 1)
    plan = load(1, before=0, partial=True)
    bench.loads.begin_step((), whole=False)
    bench.begin(plan)
    assert bench.begun == 2, "the partly filled block, and a layer"
    given = []
    for layer in ALL:
        before = bench.stream.pending + bench.stream.forced
        bench.loads.wait_layer(layer)
        bench.begun += bench.stream.pending + bench.stream.forced - before
        given.append(bench.begun - 1)
        assert bench.is_there(plan, layer)
    assert given == [2, 3, 3]
    assert bench.end_step() == Told(set(), set(), [1])


@pytest.mark.parametrize("hooks", [(), (0,)], ids=str)
def test_what_no_hook_gave_is_given_when_the_step_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, hooks: tuple[int, ...]
) -> None:
    monkeypatch.setattr(worker_copies, "LAYERS_BEFORE_PASS", 1)
    plan = load(1, before=0)
    bench.loads.begin_step((), whole=False)
    bench.begin(plan)
    for layer in hooks:
        bench.loads.wait_layer(layer)
    assert bench.end_step() == Told(set(), set(), [1])
    assert all(bench.is_there(plan, layer) for layer in ALL)


def test_a_load_ahead_is_behind_all_layers_of_this_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_copies, "LAYERS_BEFORE_PASS", 1)
    now, ahead = load(1, before=0), load(2, before=1, slot=2, blocks=(10, 11))
    bench.loads.begin_step((), whole=False)
    bench.begin(now, ahead)
    bench.forward(now)
    assert bench.over == LAYERS, "it waits for the load ahead"
    assert bench.end_step() == Told(set(), set(), [1])


def test_a_load_for_this_step_comes_after_what_was_begun_before(bench: Bench) -> None:
    ahead, now = load(1, before=3), load(2, before=0, slot=2, blocks=(10, 11))
    bench.step(ahead)
    bench.loads.begin_step((), whole=False)
    bench.begin(now)
    bench.forward(now)
    assert bench.end_step() == Told({"request 1"}, set(), [1, 2])


def test_a_load_for_a_graph_that_calls_no_hook(bench: Bench) -> None:
    plan = load(1, before=0, partial=True)
    bench.loads.begin_step((), whole=True)
    bench.begin(plan, whole=True)
    assert bench.begun == bench.over == 1, "one piece is enough"
    bench.forward(plan, hooks=())
    assert bench.end_step() == Told(set(), set(), [1])


def test_where_copies_do_not_run_beside_the_model() -> None:
    rig = Rig(ORDERS[2], None)
    rig.pages[0] = 8
    loads = Loads(rig.engine, LAYERS)
    loads.begin_step((), whole=False)
    loads.begin([load(1, before=0, partial=True)], whole=False)
    assert (rig.hbm()[:, 4:6] == 8).all()
    assert loads.take_finished() == []
    assert loads.take_times()[0] > 0
    loads.end_step()
    assert loads.take_finished() == [1]
    assert loads.take_times()[0] == 0.0


@every_load_ahead
def test_before_a_sleep_all_is_written(ahead: Ahead) -> None:
    """From complete() on the device's memory may be gone; what became of the load is told later."""
    for over in range(ahead.pieces + 1):
        bench, plan = Bench(), ahead.plan()
        bench.step(plan)
        bench.go_on_to(over)
        bench.loads.complete()
        assert bench.stream.pending == 0
        given_away = bench.give_away()
        assert bench.step() == Told({plan.request_id}, set(), [plan.plan_id])
        assert bench.blocks() == given_away
        assert bench.step() == NOTHING
