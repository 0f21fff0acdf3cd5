# SPDX-License-Identifier: Apache-2.0
"""Answers that vLLM has no room for: they cost next to nothing while the request waits, and are
what a look-up would give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.step_world import BLOCK, StepWorld

KEPT = list(range(1000, 1400))
CUT = [*KEPT, *range(7000, 7040)]
"""A prompt whose beginning was cut off."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepWorld]:
    world = StepWorld(monkeypatch, truncates=True)
    world.serve(world.request("before", [*range(50), *KEPT]))
    world.rig.until_idle()  # else the store's thread writes, and looks for what is worth it
    yield world
    world.close()


def _offer(world: StepWorld, request: Any) -> int:
    """vLLM asks, and has no room."""
    exact = list(request.block_hashes)
    found = world.ask(request)
    assert found
    assert request.block_hashes[0] != exact[0], "moved KV is hidden"
    world.end_step()
    assert request.block_hashes == exact, "vLLM looks for blocks of its own before it asks"
    return found


def test_a_cut_prompt_that_waits_for_blocks_is_worked_out_once(world: StepWorld) -> None:
    request = world.request("cut", CUT)
    world.come(request)
    found = _offer(world, request)
    world.counts.clear()
    assert [_offer(world, request) for _ in range(20)] == [found] * 20
    assert not +world.counts, "no look-up, no hash, no name"


def test_with_more_blocks_it_is_looked_up_anew(world: StepWorld) -> None:
    """And what is taken then is moved under names and keys of its own."""
    request = world.request("cut", CUT)
    world.come(request)
    found = _offer(world, request)
    world.counts.clear()
    world.free_blocks = -(-found // BLOCK) - 1  # not enough for what is offered
    _offer(world, request)
    assert not +world.counts
    world.free_blocks += 1
    _offer(world, request)
    assert +world.counts == {"looks": 1}
    taken = world.ask(request)
    assert taken
    hidden = list(request.block_hashes)
    world.start(request, taken)
    world.end_step(request)
    assert request.block_hashes == hidden
    state = world.side.requests["cut"]
    assert state.moved is not None
    assert state.sequence.root != state.root


def test_each_life_has_names_of_its_own(world: StepWorld) -> None:
    """Blocks of before it was preempted may be in vLLM's cache, and have other KV."""
    request = world.request("cut", CUT)
    world.come(request)
    seen = set()
    for _ in range(3):
        _offer(world, request)
        found = world.ask(request)
        assert found
        seen.add(request.block_hashes[0])
        world.start(request, found)
        world.end_step(request)
        world.preempt(request)
    assert len(seen) == 3


def test_what_has_left_is_not_offered_again(world: StepWorld) -> None:
    request = world.request("cut", CUT)
    world.come(request)
    _offer(world, request)
    assert world.side.reset()
    world.end_step()
    found = world.ask(request)
    while found is None:  # the weights are looked at
        world.end_step()
        found = world.ask(request)
    assert found == 0


def test_tokens_that_come_while_it_waits_are_named_twice(world: StepWorld) -> None:
    """A request that was preempted before it was offered anything may be longer."""
    request = world.request("cut", CUT)
    world.come(request)
    _offer(world, request)
    first = world.ask(request)
    assert first
    hidden = list(request.block_hashes)
    world.end_step()
    request.all_token_ids += range(9000, 9000 + 2 * BLOCK)
    request.update_block_hashes()
    world.counts.clear()
    _offer(world, request)
    assert world.counts["looks"] == 1, "it is another prompt"
    assert world.ask(request)
    assert request.block_hashes[: len(hidden)] == hidden, "nothing has them"
    assert len(request.block_hashes) == len(hidden) + 2


def test_an_exact_prompt_that_waits_for_blocks_too(world: StepWorld) -> None:
    request = world.request("again", [*range(50), *KEPT, 1, 2, 3])
    world.come(request)
    found = world.ask(request)
    assert found
    world.end_step()
    world.counts.clear()
    for _ in range(20):
        assert world.ask(request) == found
        world.end_step()
    assert not +world.counts
    assert world.ask(request, 4 * BLOCK) == found - 4 * BLOCK, "vLLM has some of it by now"
    assert world.counts["looks"] == 1
    world.end_step()
    world.rig.until_idle()  # nothing stays held
