# SPDX-License-Identifier: Apache-2.0
"""Who of those that wait for KV is looked at again in a step: few, each in turn, none for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from attnstore_vllm.connector.waits import ROUND_S, WAITS_MAX, Waits

DEADLINE_S = 1.0


class Rig:
    """Waits over a store in which nothing ever comes."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.deadline_s = DEADLINE_S
        self.hungry: set[str] = set()
        self.slept: list[int] = []
        store = SimpleNamespace(
            is_hungry=self.hungry.__contains__,
            wait_for_any=lambda pieces, timeout_s: self.slept.append(len(pieces)),
        )
        costs = SimpleNamespace(deadline=self.deadline)
        self.waits = Waits(store, costs)  # type: ignore[arg-type]

    def deadline(self, state: Any, now: float) -> float:
        state.deadline = state.deadline or now + self.deadline_s
        deadline: float = state.deadline
        return deadline

    def request(self, name: str) -> Any:
        self.hungry.add(name)
        return SimpleNamespace(
            request=SimpleNamespace(request_id=name), look=0, coming=[name],
            waiting_since=None, deadline=None, is_answered=False,
        )  # fmt: skip

    def step(self, states: list[Any], computed: str = "") -> list[Any]:
        """vLLM goes through its queue. Returns those that were looked at.

        Args:
            computed: names of those that are told to compute.
        """
        looked = []
        for state in states:
            if not self.waits.goes_on(state):
                looked.append(state)
                if state.request.request_id in computed.split():
                    self.waits.answered(state)
                else:
                    self.waits.add(state, state.coming)
        self.waits.end_step(is_empty=True)
        return looked


@pytest.fixture
def rig() -> Any:
    with mock.patch("time.monotonic") as clock:
        clock.return_value = 50.0
        yield Rig(clock)


def names(states: list[Any]) -> str:
    return "".join(state.request.request_id for state in states)


@pytest.mark.parametrize("step_s", [0.001, 0.2])
def test_all_are_looked_at_in_turn_a_few_in_a_step(rig: Rig, step_s: float) -> None:
    rig.deadline_s = 100.0
    states = [rig.request(str(n)) for n in range(10)]
    turns = []
    for _ in range(12):
        turns.append(names(rig.step(states)))
        rig.clock.return_value += step_s
    a_round = ["0123", "4567", "89"]
    assert turns == (a_round * 4 if step_s >= ROUND_S else a_round + [""] * 9)
    assert rig.slept == [WAITS_MAX] * 12, "a step without work waits for those at the front"
    rig.clock.return_value += ROUND_S
    later = [names(rig.step(states)) for _ in range(4)]
    assert "0123" in later, "and again"


def test_those_whose_kv_is_on_its_way_take_no_looks_from_others(rig: Rig) -> None:
    coming = [rig.request(f"c{n}") for n in range(6)]
    for state in coming:
        rig.hungry.discard(state.request.request_id)
    states = [rig.request(str(n)) for n in range(3)]
    assert rig.step([*coming, *states]) == [*coming, *states]


def test_who_has_an_answer_takes_no_looks_from_others(rig: Rig) -> None:
    """How many start in a step is for vLLM to say, also where all have something on NVMe."""
    states = [rig.request(str(n)) for n in range(60)]
    computed = " ".join(str(n) for n in range(50))
    assert rig.step(states, computed) == states[: 50 + WAITS_MAX]
    assert not states[0].coming, "what it wanted is not kept alive by it"


def test_an_answer_is_not_forgotten_while_vllm_has_no_room(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(3)]
    for _ in range(10):
        assert states[0] in rig.step(states, "0")
        rig.clock.return_value += 0.001
    assert states[0].waiting_since is None
    assert rig.step(states[:1]) == states[:1]  # now it should wait
    assert rig.step(states[:1]) == []


def test_the_deadline_runs_from_the_first_ask_for_all(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(40)]
    rig.step(states)
    assert {state.deadline for state in states[WAITS_MAX:]} == {50.0 + DEADLINE_S}
    assert {state.waiting_since for state in states[WAITS_MAX:]} == {50.0}
    rig.clock.return_value += DEADLINE_S
    assert not any(rig.waits.goes_on(state) for state in states[WAITS_MAX:])


def test_what_is_on_its_way_is_looked_at_whoever_waits(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(10)]
    rig.step(states)
    rig.hungry.discard("9")
    assert states[9] in rig.step(states)
