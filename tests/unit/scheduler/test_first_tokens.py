# SPDX-License-Identifier: Apache-2.0
"""TTFT by source: through a real scheduler side, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attnstore_vllm.scheduler.first_tokens import OPEN_MAX, FirstTokens, source_of
from attnstore_vllm.scheduler.request import Counted
from tests.helpers import sequence_of, tokens_of
from tests.step_world import CHUNK, StepWorld
from tests.vllm_objects import Clock, output

LENGTH = 4 * CHUNK + 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[StepWorld]:
    world = StepWorld(monkeypatch, clock=clock)
    yield world
    world.close()


def seen(world: StepWorld) -> dict[str, list[float]]:
    """By source, since this was asked last."""
    observed = world.side.take_stats().data["observed"]
    mark = "ttft_seconds:"
    return {key.removeprefix(mark): got for key, got in observed.items() if key.startswith(mark)}


def begun(world: StepWorld, name: str, start: int, local: int = 0) -> Any:
    """A request that has its blocks."""
    request = world.request(name, tokens_of(start, LENGTH))
    world.come(request)
    found = world.ask(request, local)
    assert found is not None
    world.start(request, found)
    request.num_computed_tokens += local
    return request


def test_what_is_loaded_and_what_is_computed_count_apart(world: StepWorld, clock: Clock) -> None:
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    for name, start, source in (("a", 1, "dram"), ("b", 2, "computed")):
        request = begun(world, name, start)
        clock.now += 3
        world.end_step(request)
        assert seen(world) == {source: [3]}


def test_the_first_token_comes_with_the_step_that_ends_the_prompt(
    world: StepWorld, clock: Clock
) -> None:
    request = begun(world, "a", 1)
    for stop in (CHUNK, 2 * CHUNK):
        told = {"a": (request.num_computed_tokens, stop - request.num_computed_tokens)}
        world.report(world.side.build_step(output(told, {})))
        request.num_computed_tokens = stop
        clock.now += 1
    assert not seen(world)
    plan = world.side.build_step(output({"a": (2 * CHUNK, LENGTH - 2 * CHUNK)}, {}))
    clock.now += 1
    assert not seen(world), "its output has not come"
    world.report(plan)
    assert seen(world) == {"computed": [3]}
    request.num_computed_tokens = LENGTH
    request.all_token_ids.append(7)
    world.end_step(request)
    assert not seen(world), "the second token is none"


def test_a_request_that_is_aborted_has_none_and_leaves_nothing(world: StepWorld) -> None:
    world.end(begun(world, "a", 1))
    world.end_step()
    assert not seen(world) and not len(world.side.first_tokens)


def test_a_request_counts_under_the_furthest_tier() -> None:
    for sources, in_hbm, source in (
        ({}, 0, "computed"),
        ({}, 16, "hbm"),
        ({"dram": 16}, 16, "dram"),
        ({"dram": 160, "nvme": 16}, 0, "nvme"),
        ({"nvme": 16, "shared": 16}, 0, "shared"),
        ({"peers": 16, "dram": 16}, 0, "peers"),
    ):
        assert source_of(Counted(sources=sources, in_hbm=in_hbm)) == source


def test_steps_whose_output_never_comes_are_not_kept() -> None:
    first = FirstTokens(Clock())
    for number in range(3 * OPEN_MAX):
        first.came("a")
        first.computes_all("a", Counted())
        first.planned(number)
    assert len(first) == OPEN_MAX
