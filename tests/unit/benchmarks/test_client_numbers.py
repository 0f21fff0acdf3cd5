# SPDX-License-Identifier: Apache-2.0
"""The benchmark of numbers that clients choose: its rows, and what they say of a goal."""

from __future__ import annotations

import json
import sys
import time

import pytest

from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.scheduler.scheduler import Scheduler
from benchmarks.micro import client_numbers
from benchmarks.micro.client_numbers import GOALS_MS, Row, full_tier, measure, victims_ms


def small(rounds: int) -> list[Row]:
    return list(measure(rounds, prompt_tokens=2048, children=3, lanes=8, decisions=20))


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_row_of_each_number() -> None:
    rows = small(2)
    assert [(row.name, row.goal_ms) for row in rows] == list(GOALS_MS.items())
    assert all(len(row.rounds_ms) == 2 and min(row.rounds_ms) > 0 for row in rows)


def test_a_verdict_is_of_the_median() -> None:
    assert Row("", [0.5, 3.0, 1.0], 1.0).verdict == "met"
    assert Row("", [0.5, 3.0, 1.1], 1.0).verdict == "MISSED"


def test_a_tier_keeps_its_lanes() -> None:
    """What is freed is filled again: no decision has fewer lanes to look at."""
    for order in (full_tier(40), left_by(40)):
        runs = [group.run for group in order.groups.values()]
        assert len({(run.kind, run.priority) for run in runs}) == 40
        assert len(order) == 40 * client_numbers.SLOTS_A_LANE


def left_by(lanes: int) -> Departures:
    """The tier behind a round."""
    made: list[Departures] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_numbers, "full_tier", lambda n: made.append(full_tier(n)) or made[0])  # type: ignore[func-returns-value]
        victims_ms(1, lanes, 200)
    return made[0]


@pytest.mark.parametrize(
    ("owner", "call", "row"),
    [
        (Scheduler, "get_num_new_matched_tokens", "prompt"),
        (Scheduler, "on_new_request", "child"),
        (Departures, "victim", "victim"),
    ],
)
def test_a_slow_call_misses_its_goal(
    owner: type, call: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = getattr(owner, call)

    def slow(*args: object) -> object:
        busy(GOALS_MS[row] / 1000)
        return was(*args)

    monkeypatch.setattr(owner, call, slow)
    assert "MISSED" in {each.verdict for each in small(1) if each.name == row}


def test_the_command_prints_goal_and_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("prompt", [1.0], 2.0), Row("victim", [0.2], 0.1)]
    monkeypatch.setattr(client_numbers, "measure", lambda _: rows)
    monkeypatch.setattr(sys, "argv", ["client_numbers"])
    client_numbers.main()
    prompt, victim = capsys.readouterr().out.splitlines()[-2:]
    assert prompt.split()[-2:] == ["2", "met"]
    assert victim.split()[-2:] == ["0.1", "MISSED"]
    monkeypatch.setattr(sys, "argv", ["client_numbers", "--json"])
    client_numbers.main()
    said = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in said["rows"]] == ["met", "MISSED"]
