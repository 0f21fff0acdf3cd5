# SPDX-License-Identifier: Apache-2.0
"""What may be wrong in HBM is not held, be it known by an audit, by a look at the weights, or by
what workers say of adapters. Holds on the real scheduler side, over a block pool like vLLM's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.hints import HintReader
from attnstore_vllm.scheduler.holds import Holds
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.types import Seen
from tests.helpers import tokens_of
from tests.holds_world import Manager, S
from tests.holds_world import World as HoldsWorld
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.unit.scheduler.test_audits import AuditWorld
from tests.unit.scheduler.test_new_weights import OTHERS
from tests.unit.scheduler.test_new_weights import World as WeightsWorld

LENGTH = 4 * CHUNK + 1
BLOCKS = LENGTH // BLOCK


class Conversations:
    """Requests of a world, which have blocks of a pool and are held.

    Args:
        asks: how a request comes and is given what it is offered.
    """

    def __init__(self, world: StepWorld, asks: Callable[..., Any] | None = None) -> None:
        self.world = world
        self._asks = asks or self._come
        self.others = HoldsWorld(room=200)
        self.others.pool.hash_block_size = BLOCK
        holds = self.others.holds = Holds(
            self.others.config, lambda tokens: 4 * S * tokens, HintReader(),
            lambda: self.others.now,
        )  # fmt: skip
        self.others.manager = Manager(200)
        self.pool = self.others.pool = self.others.manager.block_pool
        self.pool.hash_block_size = BLOCK
        holds.bind(self.others.manager)
        self.others.learn()
        self.holds = world.side.holds = holds

    @property
    def held(self) -> int:
        return self.others.holds.held_tokens // BLOCK

    def _come(self, tokens: list[int], name: str, local: int, **given: Any) -> Any:
        request = self.world.request(name, tokens, **given)
        self.world.come(request)
        self.world.start(request, self.world.answer(request, local))
        request.num_computed_tokens += local
        return request

    def begin(self, number: int, name: str, local: int = 0, more: int = 0, **given: Any) -> Any:
        """A request that is computed.

        Args:
            number: of the conversation.
            local: tokens that vLLM's cache has.
            more: tokens than its first turn has.
        """
        tokens = tokens_of(number, LENGTH + more)
        given["status"] = SimpleNamespace(name="FINISHED_STOPPED")
        request = self._asks(tokens, name, local, **given)
        request.blocks = self.others.take(request)
        self.world.end_step(request)
        return request

    def end(self, request: Any) -> None:
        numbers = [block.number for block in request.blocks]
        self.world.tables[request.request_id] = numbers
        self.world.end(request)
        self.pool.free_blocks(request.blocks)
        self.world.end_step()
        self.world.rig.until_idle()

    def turn(self, number: int, name: str, local: int = 0, more: int = 0, **given: Any) -> None:
        self.end(self.begin(number, name, local, more, **given))

    def empty_hbm(self) -> None:
        """What vLLM's reset does."""
        assert self.pool.reset_prefix_cache()
        for block in self.pool.blocks:
            block.block_hash = None
        manager: Any = self.world.manager
        manager.block_pool.cached_block_hash_to_block = {}


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    worlds = []

    def start(stop_after: int) -> Conversations:
        audit = {"stop_after": stop_after}
        worlds.append(AuditWorld(monkeypatch, tmp_path, 1e-9, audit=audit))
        return Conversations(worlds[-1], worlds[-1].asks)

    yield start
    for world in worlds:
        world.close()


@pytest.mark.parametrize("stop_after", [1, 1000])
def test_what_an_audit_finds_wrong_is_let_go_and_not_held_again(
    audited: Callable[[int], Conversations], stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is removed, and where all serving is stopped."""
    of = audited(stop_after)
    world: Any = of.world
    world.put(tokens_of(1, LENGTH), wrong=1)
    of.turn(1, "loads the wrong chunk")
    of.turn(2, "another")
    assert of.held == 2 * BLOCKS
    running = of.begin(1, "loads it, too")
    of.turn(3, "a third one")
    assert world.outcomes() == {} and of.held == 2 * BLOCKS
    with monkeypatch.context() as drawn:  # what a client asks for ends no serving
        drawn.setattr(world.side.audits.draw, "_below", math.inf)
        of.turn(1, "finds it")
    of.turn(4, "hears of it")
    assert world.outcomes()["differed"] == 1
    assert world.store.is_distrusted == (stop_after == 1)
    assert not of.held
    of.end(running)
    assert not of.held, "it had loaded it"
    of.turn(1, "next turn", local=LENGTH - 1, more=CHUNK)
    assert not of.held, "vLLM has it, until it needs the room"
    of.turn(5, "no turn of any")
    assert not of.held, "it may begin as any other"
    assert not any(block.ref_cnt for block in of.pool.blocks)
    of.empty_hbm()
    of.turn(6, "after a reset")
    assert of.held == (0 if world.store.is_distrusted else BLOCKS)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversations]:
    world = WeightsWorld(monkeypatch)
    yield Conversations(world)
    world.close()


def test_holds_of_other_weights_are_let_go(weights: Conversations) -> None:
    """New ones, and vLLM's own cache is not reset: as where a request runs."""
    weights.turn(1, "of before")
    running: Any = weights.begin(2, "runs meanwhile")
    assert weights.held == BLOCKS
    world: Any = weights.world
    assert world.side.reset()
    world.look = Seen.CHANGED, OTHERS
    weights.turn(3, "waits for the look")
    assert not weights.held
    weights.end(running)
    weights.turn(4, "later")
    assert not weights.held, "HBM has KV of both"
    weights.empty_hbm()
    weights.turn(5, "after a reset")
    assert weights.held == BLOCKS


def test_what_runs_over_a_reset_is_not_held(weights: Conversations) -> None:
    """Weights may be updated behind it."""
    running = weights.begin(1, "running")
    weights.world.side.reset()
    weights.end(running)
    assert not weights.held
    weights.turn(2, "later")
    assert weights.held == BLOCKS


class Adapters(StepWorld):
    """Workers have this adapter."""

    digest = b"one"

    def report(self, plan: Any) -> None:
        done = Counter(p.plan_id for p in (*plan.loads, *plan.saves, *plan.saves_before))
        weights = Seen.SAME if plan.looks_at_weights else Seen.NOTHING
        report = StepReport(plan.number, done, weights=weights)
        report.freed = Counter(plan.finished_saving)
        report.adapters = {number: {0: self.digest} for number in plan.adapters}
        self.side.on_report(report)


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversations]:
    world = Adapters(monkeypatch, serves_adapters=True)
    yield Conversations(world)
    world.close()


def poet(name: str = "poet", number: int = 1) -> dict[str, Any]:
    lora = SimpleNamespace(lora_int_id=number, lora_name=name, lora_path="/x")
    return {"lora_request": lora}


def test_holds_of_an_adapter_that_was_replaced_are_let_go(adapters: Conversations) -> None:
    """vLLM's cache goes by its name. It may be replaced again."""
    adapters.turn(1, "by the first", **poet())
    running = adapters.begin(2, "by both", **poet())
    adapters.turn(3, "by none")
    assert adapters.held == 2 * BLOCKS
    for digest in (b"two", b"three"):
        adapters.world.digest = digest  # type: ignore[attr-defined]
        adapters.turn(4, f"by {digest!r}", **poet())
        assert not adapters.held
    adapters.end(running)
    adapters.turn(5, "computed by the third alone", **poet())
    assert not adapters.held, "the name has stood for three"
    adapters.turn(6, "by another", **poet("painter", 2))
    assert adapters.held == BLOCKS
    adapters.empty_hbm()
    adapters.turn(7, "after a reset", **poet())
    assert adapters.held == BLOCKS
