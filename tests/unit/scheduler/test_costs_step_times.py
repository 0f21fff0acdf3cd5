# SPDX-License-Identifier: Apache-2.0
"""Which steps teach the cost model what, and how long they count as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from attnstore_vllm.policy.cost import StepCost
from attnstore_vllm.scheduler.costs import OPEN_MAX, StepTimes
from tests.vllm_objects import Clock, output


class Heard(StepCost):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, list[tuple[int, int]], int]] = []

    def observe(
        self, seconds: float, prompts: Sequence[tuple[int, int]], num_generating: int
    ) -> float | None:
        self.steps.append((round(seconds, 6), list(prompts), num_generating))
        return None


@pytest.fixture
def times() -> Any:
    heard = Heard()
    clock = Clock(100.0)
    return StepTimes(heard, clock), heard, clock


def test_prompts_and_answers_are_told_apart(times: Any) -> None:
    steps, heard, clock = times
    number = steps.planned(
        output(
            {"new": (512, 300)},
            {"part": (2048, 1000), "answer": (90, 1), "drafts": (70, 3)},
            drafts=["drafts"],
        )
    )
    clock.now = 100.5
    steps.ended(number, 0.0)
    assert heard.steps == [(0.5, [(512, 812), (2048, 3048)], 2)]


def test_what_a_load_has_cost_is_no_part_of_a_steps_length(times: Any) -> None:
    steps, heard, clock = times
    steps.load_tokens = 256
    number = steps.planned(output({"a": (256, 100)}, {}))
    clock.now = 100.5
    assert steps.ended(number, 0.2) == (None, 256)
    assert heard.steps == [(0.3, [(256, 356)], 0)]


def test_a_step_begins_when_the_one_before_it_ends(times: Any) -> None:
    steps, heard, clock = times
    first = steps.planned(output({"a": (0, 100)}, {}))
    clock.now = 100.1
    second = steps.planned(output({}, {"a": (100, 1)}))
    empty = steps.planned(output({}, {}))
    clock.now = 101.0
    steps.ended(first, 0.0)
    clock.now = 101.25
    steps.ended(second, 0.0)
    steps.ended(empty, 0.0)
    assert heard.steps == [(1.0, [(0, 100)], 0), (0.25, [], 1)]


def test_a_step_that_was_seen_too_late_says_nothing(times: Any) -> None:
    steps, heard, clock = times
    steps.load_tokens = 256
    number = steps.planned(output({"a": (256, 100)}, {}))
    clock.now = 100.1
    assert steps.ended(number, 0.2) == (None, 256)
    assert heard.steps == []


def test_steps_that_never_come_back_are_forgotten(times: Any) -> None:
    steps, heard, clock = times
    numbers = [steps.planned(output({"a": (0, 9)}, {})) for _ in range(2 * OPEN_MAX)]
    for number in numbers:
        clock.now += 1.0
        steps.ended(number, 0.0)
    assert len(heard.steps) == OPEN_MAX


def test_how_long_steps_take_and_how_many_run(times: Any) -> None:
    steps, _, clock = times
    for seconds, usual in ((0.5, 0.5), (0.5, 0.5), (1.3, 0.6), (60.0, 0.6 + 1.8 / 8)):
        number = steps.planned(output({"a": (0, 100)}, {"b": (90, 1)}))
        assert steps.num_running == 2
        clock.now += seconds
        steps.ended(number, 0.0)
        assert steps.usual_s == pytest.approx(usual), "one that is far longer counts in part"
    steps.planned(output({}, {}))
    assert steps.num_running == 0
