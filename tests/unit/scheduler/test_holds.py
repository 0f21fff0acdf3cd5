# SPDX-License-Identifier: Apache-2.0
"""Holds over a block pool like vLLM's: who has which blocks, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.config.hbm_holds import HoldingConfig
from attnstore_vllm.hints import HintReader
from attnstore_vllm.policy import holding as policy
from attnstore_vllm.scheduler import holds as module
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.holds import HoldEvent, Holds

BLOCK = 16
ROOM = 100
TURN = 5
"""Blocks that a turn adds."""
S = 0.01
"""Seconds for computing a token: holding pays."""


@dataclass
class Block:
    number: int
    block_hash: object = None
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """The part of vLLM's that holds use."""

    hash_block_size = BLOCK

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(ROOM + 1)]
        self.blocks[0].is_null = True
        self.num_gpu_blocks = ROOM + 1
        self.num_resets = 0

    @property
    def free(self) -> list[Block]:
        return [block for block in self.blocks[1:] if not block.ref_cnt]

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return len(self.free) == ROOM


class Manager:
    def __init__(self) -> None:
        self.block_pool = Pool()

    def allocate_slots(self, request: Any, num_blocks: int) -> list[Block] | None:
        """Blocks that have its names, and new ones."""
        names = request.block_hashes[:num_blocks]
        found = [b for name in names for b in self.block_pool.blocks[1:] if b.block_hash == name]
        new = [b for b in self.block_pool.free if b not in found]
        num_new = num_blocks - len(found)
        if num_new > len(new):
            return None
        blocks = found + sorted(new, key=lambda b: b.block_hash is not None)[:num_new]
        for block, name in zip(blocks, names, strict=True):
            block.block_hash = name
        self.block_pool.touch(blocks)
        return blocks

    def get_block_ids(self, request_id: str) -> Any:
        raise NotImplementedError


@dataclass
class World:
    config: HoldingConfig = field(default_factory=HoldingConfig)
    now: float = 0.0
    num: int = 0
    ttl_s: float | None = None
    """The server's."""

    def __post_init__(self) -> None:
        self.manager = Manager()
        self.pool = self.manager.block_pool
        self.holds = Holds(
            self.config, lambda tokens: S * tokens, HintReader(self.ttl_s), lambda: self.now
        )
        self.holds.bind(self.manager)

    def come(self, name: str, num_blocks: int) -> Any:
        self.num += 1
        request = SimpleNamespace(
            request_id=f"{name} {self.num}", block_hashes=[(name, i) for i in range(num_blocks)],
            resumable=False, skip_reading_prefix_cache=False, _block_hasher=None,
            num_tokens=num_blocks * BLOCK, kv_transfer_params=None,
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )  # fmt: skip
        self.holds.came(request)
        return request

    def start(self, request: Any) -> list[Block] | None:
        found: list[Block] | None = self.manager.allocate_slots(request, len(request.block_hashes))
        return found

    def end(self, request: Any, blocks: list[Block]) -> None:
        self.holds.ended(request, [block.number for block in blocks])
        self.pool.free_blocks(blocks)
        self.holds.end_step(is_empty=False)

    def turn(self, name: str, num_blocks: int, params: Any = None) -> None:
        request = self.come(name, num_blocks)
        request.kv_transfer_params = params
        blocks = self.start(request)
        assert blocks is not None
        self.end(request, blocks)

    def learn(self, gap_s: float = 1.0) -> None:
        """So many sessions come back after so long that it is known."""
        for number in range(policy.RETURNS_MIN):
            self.turn(f"early {number}", TURN)
            self.now += gap_s
            self.turn(f"early {number}", 2 * TURN)
        self.now += 60
        self.holds.end_step(is_empty=False)
        assert not self.held and len(self.pool.free) == ROOM
        self.holds.counts = dict.fromkeys(HoldEvent, 0)

    @property
    def held(self) -> int:
        return self.holds.held_tokens // BLOCK


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
