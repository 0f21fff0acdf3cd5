# SPDX-License-Identifier: Apache-2.0
"""Hits that are longer than DRAM: what has expired before its part is wanted is not loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnstore_vllm.policy.visits import Terms
from tests.helpers import names_of, payload_of, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock
from tests.vllm_objects import output

NUM_SLOTS, NUM_CHUNKS, TTL_S = 16, 24, 60.0
TOKENS = tokens_of(1, NUM_CHUNKS * CHUNK + 1)
NUM_BLOCKS = NUM_CHUNKS * CHUNK // BLOCK


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[StepWorld]:
    world = StepWorld(monkeypatch, slots=NUM_SLOTS, store={"clock": clock}, compute_if_sooner=False)
    run = world.store.unseen_run(Terms(ttl_s=TTL_S))
    for name in names_of(sequence_of(TOKENS)):
        chunk = world.store.begin_save(name, run)
        assert chunk is not None
        world.rig.pool.slot(chunk.dram.slot)[:] = payload_of(name)
        world.store.finish_saves([chunk])
        world.rig.until_idle()
    yield world
    world.close()


def come(world: StepWorld) -> tuple[Any, int]:
    """A request with all of it is offered it."""
    params = {"attnstore": {"ttl": TTL_S}}
    request = world.request("one", TOKENS, kv_transfer_params=params)
    world.come(request)
    found = world.answer(request)
    assert found == NUM_CHUNKS * CHUNK
    return request, found


def play(world: StepWorld, after_step: Callable[[], None] = lambda: None) -> tuple[int, set[int]]:
    """Blocks that are loaded, and those that are told to be missing."""
    loaded, missing = 0, set[int]()
    deadline = time.monotonic() + 10.0
    while world.side.any_open():
        assert time.monotonic() < deadline
        plan = world.side.build_step(output({}, {}))
        for load in plan.loads:
            loaded += load.num_blocks
            missing |= set(load.missing)
        world.report(plan)
        after_step()
        time.sleep(0.001)
    return loaded, missing


@pytest.mark.parametrize("wait_s", [TTL_S - 10, 10 * TTL_S])
def test_what_expires_while_vllm_has_no_room_is_not_loaded(
    world: StepWorld, clock: Clock, wait_s: float
) -> None:
    request, found = come(world)
    world.end_step()
    clock.now += wait_s
    again = world.ask(request)
    while again is None:
        world.end_step()
        world.rig.until_idle()
        again = world.ask(request)
    assert (again == found) == (wait_s < TTL_S)
    world.start(request, again)
    loaded, missing = play(world)
    assert (loaded, missing) == (again // BLOCK, set())


def test_what_expires_before_its_part_is_wanted_is_computed(world: StepWorld, clock: Clock) -> None:
    """Parts of one slot each; DRAM has room for those that are wanted, and no more."""
    request, found = come(world)
    world.start(request, found)
    clock.now += 10 * TTL_S
    loaded, missing = play(world)
    first = NUM_SLOTS // 2  # and as many are wanted: a request waits for these
    assert loaded == 2 * first * CHUNK // BLOCK
    assert missing == {*range(1 + loaded, 1 + NUM_BLOCKS)}


def test_a_load_in_parts_within_the_ttl_is_whole(world: StepWorld, clock: Clock) -> None:
    request, found = come(world)
    world.start(request, found)

    def after_step() -> None:
        clock.now += 0.01

    assert play(world, after_step) == (NUM_BLOCKS, set())
