# SPDX-License-Identifier: Apache-2.0
"""Media and their names, as many as clients like: what a step does for them stays within bounds,
counted in operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.scheduler.media import DEADLINE_S, LOOK_BYTES, STEP_BYTES, Content, MediaNames
from tests.helpers import tokens_of
from tests.step_world import BLOCK, StepWorld

LENGTH = 2000 * BLOCK
MANY = 40
LARGE = 1 << 30
STEP_NAMES = 2 * (LENGTH // BLOCK)
"""Blocks that a step may name anew: one prompt's, and what is left of the budget for another."""


class _Data:
    """What a processor has made."""

    def __init__(self, content: bytes, num_bytes: int) -> None:
        self.content, self.num_bytes = content, num_bytes


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def read() -> Iterator[Callable[[Any], Content | str]]:
    """Reads of LARGE data do not end before the test does."""
    ends = threading.Event()

    def digest(data: _Data) -> bytes:
        if data.num_bytes == LARGE:
            ends.wait(60)
        return data.content

    yield lambda data: Content(data.num_bytes, lambda: digest(data))
    ends.set()


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def world(
    monkeypatch: pytest.MonkeyPatch, clock: _Clock, read: Callable[[Any], Content | str]
) -> Iterator[StepWorld]:
    media = MediaNames(read, clock=clock)
    world = StepWorld(monkeypatch, records=64, slots=64, media=media)
    yield world
    world.close()


def _pictures(name: str, content: bytes, number: int = 1, num_bytes: int = 8) -> list[Any]:
    return [
        SimpleNamespace(
            identifier=f"{name}{n or ''}",
            data=_Data(content, num_bytes),
            modality="image",
            mm_position=SimpleNamespace(offset=n, length=1, is_embed=None),
        )
        for n in range(number)
    ]


def _requests(world: StepWorld, content: bytes, num_bytes: int = 8, **given: Any) -> Sequence[Any]:
    """Long prompts that begin with a picture of another's name."""
    owner = world.request("owner", tokens_of(1, BLOCK), mm_features=_pictures("cam", b"cat"))
    world.come(owner)
    world.end_step()
    pictures = [_pictures("cam", content, num_bytes=num_bytes) for _ in range(MANY)]
    requests = [
        world.request(str(n), tokens_of(2, LENGTH), mm_features=pictures[n], **given)
        for n in range(MANY)
    ]
    world.counts.clear()
    return requests


def _asked_until_named(world: StepWorld, requests: Sequence[Any]) -> None:
    steps = 0
    while any(request.mm_features[0].identifier == "cam" for request in requests):
        world.counts.clear()
        for request in requests:
            world.ask(request)
        world.end_step()
        assert world.counts["names by vLLM"] <= STEP_NAMES
        steps += 1
        assert steps <= 3 * MANY


def test_prompts_that_are_named_anew(world: StepWorld) -> None:
    """`n` of a request whose picture came under the name of another: each child's blocks are named
    anew, which costs a hash each."""
    requests = _requests(world, b"dog")
    world.come(*requests)
    assert world.counts["names by vLLM"] <= STEP_NAMES
    world.end_step()
    _asked_until_named(world, requests)


def test_prompts_that_are_given_up(world: StepWorld, clock: _Clock) -> None:
    """Their pictures were not read in time, all at once."""
    requests = _requests(world, b"dog", LARGE)
    world.come(*requests)
    for request in requests:
        assert world.ask(request) is None
    world.end_step()
    clock.now += DEADLINE_S + 1
    _asked_until_named(world, requests)


def test_prompts_that_the_store_leaves_alone(world: StepWorld) -> None:
    """vLLM uses the names of their blocks all the same."""
    requests = _requests(world, b"dog", prompt_embeds=b"some")
    world.come(*requests)
    assert world.counts["names by vLLM"] <= STEP_NAMES
    world.end_step()
    _asked_until_named(world, requests)


def test_what_does_not_wait_is_named_at_once(world: StepWorld) -> None:
    """vLLM schedules it whatever it is told, and its KV would be another picture's."""
    requests = _requests(world, b"dog", skip_reading_prefix_cache=True)
    world.come(*requests)
    assert all(request.mm_features[0].identifier != "cam" for request in requests)


def test_pictures_that_wait_are_not_looked_at(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for all requests step after step: a step looks at those that it has time for."""
    looked_at = 0
    real = MediaNames.advance

    def advance(names: MediaNames, one: Any) -> None:
        nonlocal looked_at
        looked_at += 1
        real(names, one)

    monkeypatch.setattr(MediaNames, "advance", advance)
    pictures = [_pictures(f"{n} ", b"dog", 100) for n in range(MANY)]
    requests = [
        world.request(str(n), tokens_of(1, 1000), mm_features=pictures[n]) for n in range(MANY)
    ]
    world.come(*requests)
    for _ in range(20):
        for request in requests:
            world.ask(request)
        assert looked_at <= 2 * (STEP_BYTES // LOOK_BYTES + MANY)
        world.end_step()
        looked_at = 0
    assert world.ask(requests[0]) is not None
