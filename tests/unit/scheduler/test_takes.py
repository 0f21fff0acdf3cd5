# SPDX-License-Identifier: Apache-2.0
"""vLLM takes less than it was offered, or takes it later: what is loaded backs just that, or the
load is told to have failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.types import Cause
from tests.helpers import tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.vllm_objects import output

LENGTH = 4 * CHUNK + 1
TOKENS = tokens_of(1, LENGTH)
Start = Callable[..., StepWorld]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    worlds: list[StepWorld] = []

    def begin(**options: Any) -> StepWorld:
        options = {"windows": True, "cuts_hits": True, "compute_if_sooner": False} | options
        world = StepWorld(monkeypatch, **options)
        worlds.append(world)
        world.serve(world.request("before", TOKENS))
        world.rig.until_idle()
        return world

    yield begin
    for world in worlds:
        assert world.store.residency.num_held() == 0, "what is held is let go"
        world.close()


def offered(world: StepWorld, name: str) -> tuple[Any, int]:
    """A request, and how many tokens it is offered."""
    request = world.request(name, [*TOKENS, 1, 2, 3])
    world.come(request)
    found = world.ask(request)
    assert found is not None
    assert found >= 4 * CHUNK
    return request, found


def taken(world: StepWorld, request: Any, num_tokens: int) -> Any:
    """The load that is planned when vLLM takes so many; and all ranks have made it."""
    world.start(request, num_tokens)
    plan = world.side.build_step(output({}, {}))
    (load,) = plan.loads
    if load.has_failed:
        world.side.on_failed_requests({request.request_id})
    world.report(plan)
    return load


def section(world: StepWorld, number: int) -> Chunk:
    """What the window's group has of a chunk."""
    keys = world.side.requests["again"].sequence.section(1, 0)
    found = world.store.residency.index.get(keys.key(number))
    assert found is not None
    return found


def test_any_shorter_part_is_loaded_as_if_it_had_been_offered(start: Start) -> None:
    """The spine from the first token on, and the window before the end."""
    world = start()
    for number in range(BLOCK, 4 * CHUNK + 1):
        request, _ = offered(world, str(number))
        load = taken(world, request, number)
        assert not load.has_failed
        blocks = -(-number // BLOCK)
        window = max(0, number - CHUNK + 1) // BLOCK
        assert load.num_blocks == blocks + blocks - window
        assert load.layers_before > 0
        world.finish(request)
        world.end_step()


def test_nothing_is_taken(start: Start) -> None:
    world = start()
    request, _ = offered(world, "again")
    world.start(request, 0)
    plan = world.side.build_step(output({"again": (0, CHUNK)}, {}))
    assert not plan.loads
    world.report(plan)
    assert world.side.requests["again"].load_failed is None
    world.finish(request)
    world.end_step()


def test_a_part_that_a_group_does_not_back_is_a_load_that_has_failed(start: Start) -> None:
    world = start()
    request, found = offered(world, "again")
    world.store.drop([section(world, 1)])
    world.side.take_stats()
    load = taken(world, request, 2 * CHUNK)
    assert (load.has_failed, load.num_blocks) == (True, 0)
    assert found > 2 * CHUNK
    assert world.side.take_stats().data["counters"]["recomputations:lost"] == 1
    assert world.ask(request) == 0, "it is computed, and not offered once more"
    assert world.side.requests["again"].load_failed is Cause.LOST
    world.start(request, 0)
    request.num_computed_tokens = 0
    world.end_step(request)
    world.finish(request)
    world.end_step()


def test_behind_what_is_lost_a_part_is_backed(start: Start) -> None:
    """The window of a part that ends farther lies behind the lost section."""
    world = start()
    request, _ = offered(world, "again")
    world.store.drop([section(world, 1)])
    assert not taken(world, request, 3 * CHUNK).has_failed
    world.finish(request)
    world.end_step()


def test_in_a_step_that_computes_there_is_no_word_for_it(start: Start) -> None:
    """vLLM says that it cuts hits (EngineFacts.cuts_hits). If it had not: no wrong answer."""
    world = start(cuts_hits=False)
    request, _ = offered(world, "again")
    world.store.drop([section(world, 1)])
    with pytest.raises(UnsupportedError, match=r"taken 32 stored tokens .* Please report it"):
        world.start(request, 2 * CHUNK)
    world.finish(request)
    world.end_step()


def test_more_than_was_offered_is_not_backed(start: Start) -> None:
    world = start()
    request, found = offered(world, "again")
    assert taken(world, request, found + 1).has_failed
    world.finish(request)
    world.end_step()


@pytest.mark.parametrize("less", [0, BLOCK, CHUNK])
def test_an_offer_that_was_withdrawn_is_taken_late(start: Start, less: int) -> None:
    """vLLM 0.33 defers loads: it takes them in a later step, when nothing is held any more."""
    world = start()
    request, found = offered(world, "again")
    world.end_step()
    assert world.store.residency.num_held() == 0
    load = taken(world, request, found - less)
    assert not load.has_failed
    assert load.num_blocks > 0
    world.finish(request)
    world.end_step()


def test_an_offer_that_was_withdrawn_may_be_gone(start: Start) -> None:
    world = start()
    request, found = offered(world, "again")
    world.end_step()
    world.store.drop([section(world, 3)])
    assert taken(world, request, found).has_failed
    world.finish(request)
    world.end_step()


def test_an_offer_of_before_a_reset_is_gone(start: Start) -> None:
    world = start()
    request, found = offered(world, "again")
    assert world.side.reset()
    assert taken(world, request, found).has_failed
    world.finish(request)
    world.end_step()


def test_what_is_taken_late_and_was_never_offered_has_failed(start: Start) -> None:
    """vLLM has counted it as computed when it comes back: so it waits for the load's end."""
    world = start()
    request, found = offered(world, "again")
    world.end_step()
    world.side.requests["again"].withdrawn = None
    request.num_computed_tokens = found
    assert taken(world, request, found).has_failed
    assert world.side.requests["again"].load_failed is Cause.LOST
    request.num_computed_tokens = 0
    world.finish(request)
    world.end_step()


def test_what_ends_before_the_first_piece_has_failed(start: Start) -> None:
    """Of documents with gaps before them: vLLM may end in the first gap."""
    world = start(windows=False)
    request, _ = offered(world, "again")
    state = world.side.requests["again"]
    assert state.offered is not None
    first, *rest = state.offered.pieces
    world.store.release([first.chunk])
    state.offered = replace(state.offered, pieces=rest, layers_before=1)
    assert taken(world, request, BLOCK).has_failed
    world.finish(request)
    world.end_step()
