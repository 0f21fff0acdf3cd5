# SPDX-License-Identifier: Apache-2.0
"""Holds under vLLM's real schedulers, over a scripted model that checks all KV it attends to.

Goal: in any order (returns, aborts, preemptions, resets, drafts, steps in flight), no
request lacks a block that a hold has, and all blocks come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.policy.holding import Holding
from attnstore_vllm.scheduler.held_blocks import HeldBlocks
from attnstore_vllm.scheduler.holds import HoldEvent, Holds
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.scripted_worker import VOCAB

STEP_S = 0.05


@dataclass(frozen=True)
class Case:
    name: str
    depth: int
    num_blocks: int = 60
    drafts: int = 0
    policy: str = "fcfs"


CASES = [
    Case("synchronous", depth=1),
    Case("steps in flight", depth=2),
    Case("drafts", depth=1, drafts=3),
    Case("little room", depth=2, num_blocks=40),
    Case("priorities", depth=2, num_blocks=44, policy="priority"),
    Case("much room", depth=2, num_blocks=300),
]


@dataclass
class World:
    """An engine, and conversations with it. A step takes STEP_S by the clock of holds."""

    engine: ScriptedEngine
    now: float = 0.0

    def __post_init__(self) -> None:
        self.pool = self.engine.scheduler.kv_cache_manager.block_pool
        self.counts = dict.fromkeys(HoldEvent, 0)
        self.total_free = self.pool.get_num_free_blocks()
        self.num_steps = 0
        holds: Holds | None = self.engine.ours.holds
        self.held = holds
        if holds is None:
            return
        # The scripted model computes in no time.
        holds.computing_s, holds.clock = lambda tokens: 0.01 * tokens, lambda: self.now
        holds.counts = self.counts
        holds.add_to = lambda stats: None  # type: ignore[method-assign]  # else each step empties it
        # Tiers have all, which makes returns cheap: then nothing would be held.
        holds.found = lambda *_: None  # type: ignore[method-assign]
        manager: Any = self.engine.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def checked(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = allocate(request, *args, **kwargs)
            assert found is not None or not holds.held, "it has no room, and others are held"
            return found

        manager.allocate_slots = checked

    @property
    def holds(self) -> Holds:
        assert self.held is not None
        return self.held

    def step(self) -> None:
        self.engine.step()
        self.now += STEP_S
        self.num_steps += 1

    def drain(self) -> None:
        for _ in range(3000):
            if not (self.engine.scheduler.has_requests() or self.engine.in_flight):
                return
            self.step()
        raise AssertionError("requests are left")

    def ask(self, number: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Any:
        request = self.engine.make_request(number, prompt, max_tokens, priority)
        self.engine.scheduler.add_request(request)
        return request

    def turn(self, number: str, prompt: list[int], max_tokens: int = 10) -> list[int]:
        request = self.ask(number, prompt, max_tokens)
        self.drain()
        return list(request.all_token_ids)

    def learn(self) -> None:
        for number in range(10):
            text = self.turn(f"early {number}", tokens(number, 40))
            self.now += 2.0
            self.turn(f"early {number} again", [*text, *tokens("more", 20)])

    def check_blocks(self) -> None:
        """After all requests have ended: blocks are free, or held as often as holds say."""
        held = [block for block in self.pool.blocks if block.ref_cnt and not block.is_null]
        assert all(block.ref_cnt == 1 for block in held), "not one use of each block"
        assert len(held) == self.holds.held.num_blocks, "blocks are lost"
        assert self.holds.followed[1:] == (0, 0)
        self.holds.clear()
        assert self.pool.get_num_free_blocks() == self.total_free, "blocks are lost"


def tokens(seed: object, number: int) -> list[int]:
    random = Random(str(seed))
    return [random.randrange(VOCAB) for _ in range(number)]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


def make(case: Case, model: Path, store: Path, seed: int = 0, holding: object = None) -> World:
    return World(
        ScriptedEngine(
            model, store, num_blocks=case.num_blocks, depth=case.depth, seed=seed,
            drafts=case.drafts, policy=case.policy, holding={} if holding is None else holding,
        )
    )  # fmt: skip


@pytest.fixture
def world(case: Case, model: Path, tmp_path: Path) -> Iterator[World]:
    world = make(case, model, tmp_path / "store")
    yield world
    world.engine.close()


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
one_case = pytest.mark.parametrize("case", [CASES[1]], ids=lambda case: case.name)
large_case = pytest.mark.parametrize("case", [CASES[5]], ids=lambda case: case.name)


def drive(world: World, seed: int, num_requests: int = 60) -> None:
    """Conversations go on, some at the same time; some requests are aborted; HBM is reset."""
    random = Random(seed)
    texts = [tokens((seed, i), random.randrange(20, 120)) for i in range(8)]
    alive: dict[str, tuple[int, Any]] = {}
    for number in range(num_requests):
        one = random.randrange(len(texts))
        if len(texts[one]) > 330:
            texts[one] = texts[one][:50]
        prompt = [*texts[one], *tokens((seed, number), random.randrange(1, 40))]
        request = world.ask(str(number), prompt, random.randrange(1, 50), random.randrange(3))
        alive[str(number)] = one, request
        for _ in range(random.randrange(12)):
            world.step()
        world.now += random.choice([0.0, 0.3, 1.0])
        if random.random() < 0.15:
            world.engine.abort(random.choice([*alive]))
        for name in [name for name, (_, r) in alive.items() if r.is_finished()]:
            one, request = alive.pop(name)
            texts[one] = list(request.all_token_ids)
        if random.random() < 0.05:
            with suppress(RuntimeError):  # requests that load have blocks: so it is without holds
                world.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert not world.holds.held
    world.drain()


@each_case
@pytest.mark.parametrize("seed", [0, 1])
def test_no_request_lacks_what_is_held_and_no_block_is_lost(world: World, seed: int) -> None:
    world.learn()
    drive(world, seed)
    assert world.counts[HoldEvent.MADE] > 3 and world.counts[HoldEvent.RETURNED]
    world.check_blocks()
    assert world.engine.scheduler.reset_prefix_cache()


@large_case
def test_a_return_finds_what_others_would_have_evicted(
    case: Case, world: World, model: Path, tmp_path: Path
) -> None:
    def cached(world: World) -> int:
        world.learn()
        text = world.turn("one", tokens("one", 200))
        began_at = world.now
        for number in range(23):  # more than all of HBM, and never all of it at once
            world.turn(f"other {number}", tokens(f"other {number}", 400), 2)
            world.now = began_at  # the hold is not over
            world.engine.ours.reset()  # what comes back is not from a tier
        found: list[int] = []
        ours = world.engine.ours
        ask = ours.get_num_new_matched_tokens

        def asked(request: Any, local: int) -> Any:
            found.append(local)
            return ask(request, local)

        ours.get_num_new_matched_tokens = asked
        world.turn("two", [*text, 1, 2, 3], 2)
        return found[-1]

    without = make(case, model, tmp_path / "plain", holding="off")
    assert without.engine.ours.holds is None
    assert cached(without) == 0
    without.engine.close()
    assert cached(world) >= 200


@one_case
def test_a_reset_while_blocks_are_held(world: World) -> None:
    world.learn()
    world.turn("one", tokens("one", 100))
    assert world.holds.held_tokens
    assert world.engine.scheduler.reset_prefix_cache()
    assert not world.holds.held_tokens
    world.turn("two", tokens("two", 100))
    running = world.ask("three", tokens("three", 100), 30)
    for _ in range(4):
        world.step()
    assert world.holds.held_tokens
    with suppress(RuntimeError):  # blocks that are still copied from: so it is without holds
        world.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not world.holds.held_tokens
    world.drain()
    assert running.is_finished()
    world.check_blocks()


@one_case
def test_a_hostile_client_with_many_sessions(world: World) -> None:
    world.learn()
    for number in range(150):
        world.ask(f"hostile {number}", tokens(("hostile", number), 40), 1)
    world.drain()
    assert world.holds.held_tokens <= 0.9 * 60 * 16
    before = world.num_steps
    world.turn("honest", tokens("honest", 400), 4)
    assert world.num_steps - before < 20
    world.check_blocks()


@one_case
def test_requests_at_the_door_go_in_at_the_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.learn()
    text = world.turn("one", tokens("one", 100))
    assert world.holds.make_room("another")
    long = world.ask("long", tokens("long", 50), 400)
    monkeypatch.setattr(Holding, "_is_guarded", lambda *_: True)
    monkeypatch.setattr(Holding, "_fits", lambda *_: False)
    request = world.ask("two", [*text, 1, 2], 2)
    while not request.is_finished() and not long.is_finished():
        world.step()
        world.now += 0.5
        assert world.now < 500
    assert request.is_finished() and not long.is_finished(), "it waits at the door without an end"
    assert world.counts[HoldEvent.DEFERRED] == 1
    world.engine.abort("long")
    world.drain()
    world.check_blocks()


# ---- faults that the above would see ---------------------------------------------------


def freed_by_holds(world: World, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """What a hold lets go of is freed so many times."""
    release, free = HeldBlocks.release, world.pool.free_blocks

    def free_all(blocks: Iterable[Any]) -> None:
        for some in [[*blocks]] * times:
            free(some)

    def released(held: HeldBlocks, session: int) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(world.pool, "free_blocks", free_all)
            return release(held, session)

    monkeypatch.setattr(HeldBlocks, "release", released)


@one_case
def test_a_hold_that_is_never_released_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed_by_holds(world, monkeypatch, 0)
    world.learn()
    world.turn("one", tokens("one", 100))
    with pytest.raises(AssertionError, match="not one use of each block"):
        world.check_blocks()


@one_case
def test_a_hold_that_is_released_twice_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed_by_holds(world, monkeypatch, 2)
    world.learn()
    world.turn("one", tokens("one", 100))
    with pytest.raises(AssertionError, match="not one use of each block"):
        world.check_blocks()


@one_case
def test_holds_that_keep_their_room_are_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.learn()
    monkeypatch.setattr(Holds, "make_room", lambda *_: False)
    with pytest.raises(AssertionError, match="others are held"):
        drive(world, 0)


@one_case
def test_a_door_without_a_deadline_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holding, "is_admitted", lambda *_: False)
    with pytest.raises(AssertionError, match="waits at the door without an end"):
        test_requests_at_the_door_go_in_at_the_deadline(world, monkeypatch)
