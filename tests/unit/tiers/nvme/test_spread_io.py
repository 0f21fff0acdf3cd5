# SPDX-License-Identifier: Apache-2.0
"""NVMe over several nodes: when the disk of another node counts as late, or as out of use.

The node is the test: it sees the orders of each step, and says what comes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.index.chunk import State
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.breaker import PAUSE_MAX_S, PAUSE_MIN_S
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.node_disk import LOOK, NodeFailure, NodeOrder, NodeResult
from attnstore_vllm.tiers.nvme.spread_io import SpreadIo
from attnstore_vllm.types import NVME, Event
from tests.helpers import Rig, conversation, memory_rig, names_of, sequence_of, tokens_of
from tests.unit.policy.test_visits import Clock

DEADLINE_S = 5.0


class Engine:
    """A store, and the steps that take its orders to the one other node and bring its results."""

    def __init__(self) -> None:
        self.clock, self._step = Clock(), 0
        make = partial(SpreadIo, others=1, digests={1: b"digest"})
        self.rig: Rig = memory_rig(
            32, 4, make_disk=make, clock=self.clock, io_deadline_ms=1000 * DEADLINE_S
        )
        found = self.rig.store.thread.tiers[0]
        assert isinstance(found, SpreadIo)
        self.io = found
        self.orders: list[NodeOrder] = []
        """That the node has, and has not answered."""

    @property
    def device(self) -> MemoryDevice:
        assert isinstance(self.rig.device, MemoryDevice)
        return self.rig.device

    def begin_step(self) -> int:
        self._step += 1
        self.orders += self.io.take_orders(self._step)
        return self._step

    def end_step(self, step: int, results: list[NodeResult] | None = None) -> None:
        self.io.on_results(results or [], step)
        self.device.settle()

    def answer(self, failed: NodeFailure = NodeFailure.NO) -> list[NodeResult]:
        """The node's results of all orders that it has."""
        orders, self.orders = self.orders, []
        return [NodeResult(1, order.number, failed, "a disk") for order in orders]

    def step(self) -> None:
        """The node does at once what it is told."""
        step = self.begin_step()
        self.end_step(step, self.answer())

    def settle(self) -> None:
        while self.orders or not self.rig.store.is_idle():
            self.device.settle()
            self.step()

    def store_and_push_out(self) -> list[int]:
        """A conversation that NVMe alone has."""
        tokens = conversation(1)
        self.rig.put_all(sequence_of(tokens))
        self.settle()
        for number in range(4):
            self.rig.put_all(sequence_of(tokens_of(50 + number, 16)))
            self.settle()
        for name in names_of(sequence_of(tokens)):
            chunk = self.rig.chunk(name)
            assert (chunk.dram.state, chunk.at(NVME).state) == (State.ABSENT, State.READY)
        return tokens

    def find(self, tokens: list[int]) -> int:
        """A look-up, whose reads begin. Returns how many chunks it has found."""
        found = self.rig.store.find(Lookup(sequence_of(tokens)), 0, len(tokens))
        self.device.settle()
        return len(found)

    @property
    def reads_in_use(self) -> bool:
        return self.io.health.reads.in_use


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    found.device.settle()
    yield found
    found.rig.close()


def test_a_long_step_before_the_order_is_no_late_disk(engine: Engine) -> None:
    """Steps overlap. The report of one that had no order says nothing of the order behind it."""
    tokens = engine.store_and_push_out()
    before = engine.begin_step()
    assert engine.find(tokens) == 3
    step = engine.begin_step()
    assert engine.orders
    engine.clock.now += 2 * DEADLINE_S
    engine.end_step(before)
    engine.end_step(step, engine.answer())
    assert engine.reads_in_use
    assert engine.rig.store.residency.counts[Event.READ_LATE] == 0
    assert engine.rig.check_read(sequence_of(tokens)) == 3


def test_an_answer_that_two_reports_lack_is_late(engine: Engine) -> None:
    """The time counts from the first report that could have had it."""
    tokens = engine.store_and_push_out()
    assert engine.find(tokens) == 3
    engine.end_step(engine.begin_step())
    engine.clock.now += 0.9 * DEADLINE_S
    engine.end_step(engine.begin_step())
    assert engine.reads_in_use
    engine.clock.now += 0.2 * DEADLINE_S
    assert engine.io.is_busy(), "it steps on until the answer is late"
    engine.end_step(engine.begin_step())
    assert not engine.reads_in_use
    assert engine.rig.store.residency.counts[Event.READ_LATE] == 3
    engine.step()


def look(engine: Engine, seconds: float = 1.0) -> set[Op]:
    """Time goes on. Returns the directions in which the node is looked at next."""
    engine.clock.now += seconds
    engine.device.settle()
    engine.begin_step()
    return {order.op for order in engine.orders if order.slot == LOOK}


def test_a_disk_that_hangs_stays_out_of_use(engine: Engine) -> None:
    """The first node's own disk answers each look. The other's does not."""
    tokens = engine.store_and_push_out()
    engine.find(tokens)
    for _ in range(3):
        engine.end_step(engine.begin_step())
        engine.clock.now += DEADLINE_S
    for _ in range(200):
        engine.clock.now += 1.0
        engine.end_step(engine.begin_step())
        assert not engine.reads_in_use
    assert len(engine.orders) == 3 + 2, "it gets no more looks than it answers"
    assert not engine.io.is_busy(), "the engine would step for ever"
    engine.end_step(engine.begin_step(), engine.answer())
    for _ in range(2):
        engine.clock.now += PAUSE_MAX_S
        engine.device.settle()
        engine.step()
    assert engine.reads_in_use
    assert engine.find(tokens) == 0, "they were late, and are computed"


def test_a_disk_that_refuses_is_left_alone_for_a_pause_that_doubles(engine: Engine) -> None:
    tokens = engine.store_and_push_out()
    engine.find(tokens)
    step = engine.begin_step()
    engine.end_step(step, engine.answer(NodeFailure.DEVICE))
    pause = PAUSE_MIN_S
    for _ in range(4):
        assert not look(engine, 0.9 * pause)
        assert look(engine, 0.2 * pause) == {Op.READ, Op.WRITE}
        engine.end_step(engine.begin_step(), engine.answer(NodeFailure.DEVICE))
        assert not engine.reads_in_use
        pause *= 2
    assert look(engine, pause)
    engine.step()
    assert engine.reads_in_use
    assert engine.io.health.writes.in_use


def test_one_direction_works_again_without_the_other(engine: Engine) -> None:
    """As of a file system that has become read-only."""
    engine.find(engine.store_and_push_out())
    engine.end_step(engine.begin_step(), engine.answer(NodeFailure.DEVICE))
    assert look(engine, 1.1 * PAUSE_MIN_S) == {Op.READ, Op.WRITE}
    failures = {Op.READ: NodeFailure.NO, Op.WRITE: NodeFailure.DEVICE}
    results = [NodeResult(1, order.number, failures[order.op]) for order in engine.orders]
    engine.orders.clear()
    engine.end_step(engine.begin_step(), results)
    assert engine.reads_in_use
    assert not engine.io.health.writes.in_use
    engine.settle()
