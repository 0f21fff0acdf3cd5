# SPDX-License-Identifier: Apache-2.0
"""Holds over a block pool like vLLM's: who has which blocks, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.config.hbm_holds import HoldingConfig
from attnstore_vllm.hints import HintReader
from attnstore_vllm.scheduler import holds as module
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.holds import HoldEvent, Holds
from tests.holds_world import BLOCK, ROOM, TURN, S, World


@pytest.fixture
def world() -> World:
    world = World()
    world.learn()
    return world


def test_a_session_finds_its_blocks_and_they_are_its_own(world: World) -> None:
    world.turn("a", TURN)
    assert world.held == TURN and len(world.pool.free) == ROOM - TURN
    world.now += 1.0
    request = world.come("a", 2 * TURN)
    assert world.held == TURN  # until it has them
    blocks = world.start(request)
    assert blocks is not None and not world.held
    assert all(block.ref_cnt == 1 for block in blocks)
    assert world.holds.counts[HoldEvent.RETURNED] == 1
    world.end(request, blocks)
    assert world.held == 2 * TURN


def test_a_hold_ends_in_time(world: World) -> None:
    world.turn("a", TURN)
    world.now += 31
    world.holds.end_step(is_empty=True)
    assert not world.held and len(world.pool.free) == ROOM
    assert world.holds.counts[HoldEvent.OVER] == 1


def test_a_request_never_lacks_what_is_held(world: World) -> None:
    for name in "abcdefgh":
        world.turn(name, 10)
    assert world.held == 80
    request = world.come("large", ROOM)
    blocks = world.start(request)
    assert blocks is not None and len(blocks) == ROOM and not world.held
    assert world.holds.counts[HoldEvent.GAVE_WAY] == 8
    assert world.start(world.come("more", 1)) is None  # it has no room without holds either


def test_no_more_is_let_go_than_is_needed(world: World) -> None:
    for name in "abcdefgh":
        world.turn(name, 10)
    assert world.start(world.come("other", 25)) is not None
    assert world.held == 70


def test_the_share_bounds_all_holds() -> None:
    world = World(HoldingConfig(share=0.3))
    world.learn()
    for number in range(9):
        world.turn(str(number), 10)
    assert world.held == 30


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "RUNNING"])
def test_what_is_aborted_is_not_held(world: World, status: str) -> None:
    request = world.come("a", TURN)
    blocks = world.start(request)
    request.status.name = status
    assert blocks is not None
    world.end(request, blocks)
    assert not world.held and len(world.pool.free) == ROOM


ACTION = {"action_type": "attnstore.hints", "action_version": "1", "payload": {"store": False}}


@pytest.mark.parametrize(
    "params",
    [
        {"attnstore": {"store": False}},
        {"attnstore": {"ended": True}},
        {"kv_hint": {"actions": [ACTION]}},
    ],
)
def test_what_is_to_leave_nothing_is_not_held(world: World, params: Any) -> None:
    world.turn("a", TURN)
    world.turn("a", 2 * TURN, params)
    assert not world.held and len(world.pool.free) == ROOM


@pytest.mark.parametrize(
    ("server_s", "params"),
    [
        (None, {"attnstore": {"ttl": 5}}),
        (None, {"agent_hint": {"cache_control": {"ttl": "5s"}}}),
        (5.0, {"attnstore": {"ttl": "1h"}}),
        (5.0, None),
    ],
)
@pytest.mark.parametrize("is_back", [False, True])
def test_no_hold_outlasts_a_ttl(server_s: float | None, params: Any, is_back: bool) -> None:
    """Nor while its session waits for room."""
    world = World(ttl_s=server_s)
    world.holds.computing_s = float  # so much that a hold pays for long
    world.learn(gap_s=20.0)
    world.turn("a", TURN, params)
    world.now += 4.9
    if is_back:
        world.come("a", 2 * TURN)
    world.holds.end_step(is_empty=False)
    assert world.held == TURN
    world.now += 0.2
    world.holds.end_step(is_empty=False)
    assert not world.held and len(world.pool.free) == ROOM


def test_an_abort_in_the_queue_lets_go(world: World) -> None:
    world.turn("a", TURN)
    request = world.come("a", 2 * TURN)
    world.end(request, [])
    assert not world.held and len(world.pool.free) == ROOM
    assert world.holds.counts[HoldEvent.DROPPED] == 1


def test_a_reset_lets_go_first(world: World) -> None:
    world.turn("a", TURN)
    assert world.pool.reset_prefix_cache() and world.pool.num_resets == 1
    assert not world.held
    world.turn("b", TURN)  # and it goes on
    assert world.held == TURN


def test_the_same_tokens_again_take_the_place_of_the_hold(world: World) -> None:
    first, second = world.come("a", TURN), world.come("a", TURN)
    for request in (first, second):
        blocks = world.start(request)
        assert blocks is not None
        world.end(request, blocks)
    assert world.held == TURN and {b.ref_cnt for b in world.pool.blocks} == {0, 1}


def test_sessions_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSIONS_MAX", 20)
    for number in range(100):
        world.turn(f"hostile {number}", 1)
    assert world.holds.followed == (20, 0, 0) and world.held <= 20


def thrash(world: World) -> Any:
    """A session that was let go comes back, while others fill HBM."""
    for name in "abcdefgh":
        world.turn(name, 10)
    world.now += 0.1
    running = world.come("other", 90)
    assert world.start(running) is not None
    return world.come("a", 11), running


def test_what_was_let_go_waits_at_the_door_and_no_longer_than_its_deadline(world: World) -> None:
    request, _ = thrash(world)
    others = world.come("new", 11)
    assert world.holds.waits(request) and world.holds.waits(request)
    assert not world.holds.waits(others), "a first request waits"
    assert world.holds.counts[HoldEvent.DEFERRED] == 1
    world.now += 20
    assert world.holds.waits(request)
    world.holds.holding.let_go_at = world.now + 100  # type: ignore[union-attr]
    world.now += 41
    assert not world.holds.waits(request), "there is no deadline at the door"


def test_the_door_opens_where_nothing_runs(world: World) -> None:
    request, _ = thrash(world)
    assert world.holds.waits(request)
    world.holds.end_step(is_empty=True)
    assert not world.holds.waits(request)


def test_few_wait_at_the_door_in_one_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOOR_MAX", 1)
    request, _ = thrash(world)
    other = world.come("b", 11)
    assert world.holds.waits(request) and not world.holds.waits(other)
    world.holds.end_step(is_empty=False)
    assert world.holds.waits(other)


def test_no_request_waits_where_that_is_off() -> None:
    world = World(HoldingConfig(defer_s=0.0))
    world.learn()
    request, _ = thrash(world)
    assert not world.holds.waits(request)


def test_figures(world: World) -> None:
    world.turn("a", TURN)
    stats = StepStats()
    world.holds.add_to(stats)
    assert stats.data["counters"] == {"holds:made": 1}
    assert stats.data["gauges"]["held_hbm_tokens:"][1] == TURN * BLOCK
    world.holds.add_to(again := StepStats())
    assert not again.data["counters"] and not again.data["gauges"]


def test_a_pool_that_is_not_known_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    holds = Holds(HoldingConfig(), lambda tokens: S * tokens, HintReader())
    manager: Any = SimpleNamespace(block_pool=SimpleNamespace())
    holds.bind(manager)
    assert "holding is off" in caplog.text and not hasattr(manager, "allocate_slots")
    world = World()
    holds.came(world.come("a", 1))
    assert holds.followed[1] == 0


# ---- blocks that several sessions share --------------------------------------------------


def test_what_children_share_is_counted_once(world: World) -> None:
    """In what is held, by the metric, and in what others may hold beside it."""
    children = world.children("p", 8, prompt=10)
    started = [world.start(child) for child in children]
    for child, blocks in zip(children, started, strict=True):
        assert blocks is not None
        world.end(child, blocks)
    assert world.held == world.in_use == 10 + 8
    assert all(block.ref_cnt <= 1 for block in world.pool.blocks)
    world.turn("another client", TURN)
    assert world.held == world.in_use == 10 + 8 + TURN


def test_what_agents_share_is_held_until_the_last_of_them_is_let_go(world: World) -> None:
    """Behind one system prompt, where one has a turn that begins another's."""
    system = [("system", number) for number in range(6)]
    texts: dict[str, list[object]] = {
        "a": [*system, "a1", "a2", "a3", "a4"],
        "b": [*system, "b1", "b2"],
        "of a": [*system, "a1", "a2"],
        "short": [*system[:4]],
    }
    for name, names in texts.items():
        request = world.ask(name, names)
        blocks = world.start(request)
        assert blocks is not None
        world.end(request, blocks)
    assert world.held == world.in_use == 6 + 4 + 2
    sessions = world.holds.held.sessions
    for session, left in zip(sessions, (6 + 2 + 2, 6 + 2, 4, 0), strict=True):
        world.holds.release(session, HoldEvent.OVER)
        assert world.held == world.in_use == left
    assert {block.block_hash for block in world.pool.free} >= {*system, "a4", "b2"}


def test_one_of_the_requests_of_a_prompt_is_learned_from(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where those of several prompts take turns."""
    learned: list[bool] = []
    ended = world.policy.ended

    def told(*args: Any, is_copy: bool, **options: Any) -> bool:
        learned.append(not is_copy)
        return ended(*args, is_copy=is_copy, **options)

    monkeypatch.setattr(world.policy, "ended", told)
    children = [world.child(name, number, prompt=5) for number in range(4) for name in "abc"]
    for child, blocks in [(child, world.take(child)) for child in children]:
        world.end(child, blocks)
    world.turn("d", TURN)
    assert learned == [True] * 3 + [False] * 9 + [True]


def test_nothing_is_held_behind_a_block_that_no_other_request_finds(world: World) -> None:
    request = world.come("a", TURN)
    blocks = world.start(request)
    assert blocks is not None
    blocks[2].block_hash = None
    world.end(request, blocks)
    assert world.held == world.in_use == 2


def test_blocks_that_running_requests_share_do_not_close_the_door(world: World) -> None:
    for name in "abcdefgh":
        world.turn(name, 10)
    abort(world, world.come("large", ROOM))
    assert all(world.start(child) for child in world.children("p", 8, prompt=10))
    assert world.in_use == 10 + 8
    assert not world.holds.waits(world.come("a", 11))


def test_children_of_a_long_prompt_do_not_close_the_door_to_short_sessions(world: World) -> None:
    """A request counts once for how long requests are, with all its children."""
    world.turn("a", TURN)
    children = world.children("p", 30, prompt=60)
    for child, blocks in [(child, world.start(child)) for child in children]:
        world.end(child, blocks or [])
    abort(world, world.come("large", ROOM))
    for name in "bcde":
        assert world.start(world.come(name, TURN))
    assert world.in_use == 4 * TURN
    assert not world.holds.waits(world.come("a", TURN + 1))


def abort(world: World, request: Any) -> None:
    """A request that takes what others hold."""
    blocks = world.start(request)
    assert blocks is not None and not world.held
    request.status.name = "FINISHED_ABORTED"
    world.end(request, blocks)
