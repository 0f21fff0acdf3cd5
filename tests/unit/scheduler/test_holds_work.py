# SPDX-License-Identifier: Apache-2.0
"""What holds do on the scheduler's thread, counted in lines of Python, where a client says how
much: sessions of one block, returns by the hundred, children of a long prompt.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from attnstore_vllm.policy.gaps import Gaps
from attnstore_vllm.policy.holding import LOOKS, OVER_MAX, SESSIONS_MAX, Holding
from attnstore_vllm.scheduler.holds import HoldEvent
from tests.holds_world import BLOCK, S, World

ROOM_TOKENS = 458_000


class Lines:
    number = 0


@contextmanager
def counted() -> Iterator[Lines]:
    """Lines of attnstore_vllm that run, each time that they do."""
    lines, before = Lines(), sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "attnstore_vllm" not in frame.f_code.co_filename:
            return None
        lines.number += event == "line"
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def lines_of(call: Callable[[], object]) -> int:
    with counted() as lines:
        call()
    return lines.number


def full(number: int = SESSIONS_MAX) -> tuple[Holding, float]:
    """So many sessions of one block are held."""
    holding, now = Holding(ROOM_TOKENS), 0.0
    for session in range(64):
        holding.started(session, BLOCK)
        end(holding, session, now)
        now += 1.0
        holding.came(session, now)
        holding.gone(session)
    for session in range(1000, 1000 + number):
        holding.started(session, BLOCK)
        assert end(holding, session, now)
    return holding, now


def end(holding: Holding, session: int, now: float) -> bool:
    return holding.ended(session, BLOCK, S * BLOCK, now, in_use=0, held=0)


def test_each_allocation_lets_go_of_one() -> None:
    """In one step, as for requests that each need one block."""
    holding, now = full()
    one = lines_of(lambda: holding.let_go(now + 0.5))
    assert one < 12 * LOOKS
    more = lines_of(lambda: [holding.let_go(now + 0.5) for _ in range(LOOKS - 1)])
    assert more < 40 * LOOKS, "they are put in order again for each"
    assert sum(session in holding for session in range(1000, 6000)) == SESSIONS_MAX - LOOKS


def test_many_let_go_at_once() -> None:
    holding, now = full()
    assert lines_of(lambda: holding.let_go(now + 0.5, SESSIONS_MAX)) < 40 * SESSIONS_MAX
    assert not any(session in holding for session in range(1000, 6000))


def test_the_end_of_a_step_looks_at_those_that_are_over() -> None:
    holding, now = full()
    assert lines_of(lambda: holding.over(now + 0.5)) < 20
    assert lines_of(lambda: holding.over(now + 60)) < 40 * OVER_MAX
    assert sum(session in holding for session in range(1000, 6000)) == SESSIONS_MAX - OVER_MAX


def test_many_come_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    fit = Gaps.fit

    def seen(gaps: Gaps, away_s: Any) -> None:
        fits.append(len(away_s))
        fit(gaps, away_s)

    monkeypatch.setattr(Gaps, "fit", seen)
    holding, now = full()
    fits.clear()
    with counted() as lines:
        for session in range(1000, 2000):
            holding.came(session, now + 1.0)
    assert lines.number < 40 * 1000
    end(holding, 1, now + 1.0)
    assert fits == [SESSIONS_MAX - 1000 + 1], "gaps are learned once of all"


def test_gaps_are_learned_of_many_as_of_few() -> None:
    few, many = Gaps(), Gaps()
    assert lines_of(lambda: few.fit(np.ones(10))) == lines_of(lambda: many.fit(np.ones(4096)))


class Away(OrderedDict[object, tuple[int, int]]):
    looks = 0

    def __contains__(self, name: object) -> bool:
        self.looks += 1
        return super().__contains__(name)


@pytest.mark.parametrize("is_worth_it", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_children_of_a_long_prompt(prompts: int, is_worth_it: bool) -> None:
    """Whether they are held or not, and where several such requests take turns."""
    world = World(room=9000)
    world.learn()
    if not is_worth_it:
        world.holds.computing_s = lambda tokens: 0.0
    world.holds.away = away = Away(world.holds.away)
    length, number, came, lines = 2500, 20, 0, 0
    started = []
    for child in range(number):
        for prompt in range(prompts):
            with counted() as some:
                request = world.child(f"prompt {prompt}", child, length)
            came += some.number if child else 0
            started.append((request, world.take(request)))
    for child, (request, blocks) in enumerate(started):
        numbers = [block.number for block in blocks]
        with counted() as some:
            world.holds.ended(request, numbers)
        lines += some.number if child >= prompts else 0
    children = (number - 1) * prompts
    assert came < 40 * children
    assert away.looks < 1.1 * prompts * length, "the same prompt is looked for again"
    assert lines < 150 * children
    assert world.holds.counts[HoldEvent.MADE] == is_worth_it * number * prompts
    assert world.held == is_worth_it * (length + number) * prompts
