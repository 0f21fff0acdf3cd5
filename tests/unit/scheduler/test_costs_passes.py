# SPDX-License-Identifier: Apache-2.0
"""Whether documents are loaded and what lies between them computed, or all is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.scheduler.costs import Chosen, StepTimes
from attnstore_vllm.transfer.plan import PassPlan, Selection, TokenRun
from tests.unit.scheduler.test_costs import BYTES, make_costs, teach
from tests.unit.scheduler.test_costs_step_times import Heard
from tests.vllm_objects import Clock, output

TOKEN_S = 0.001


def documents(*places: tuple[int, int]) -> Any:
    return [SimpleNamespace(start=start, stop=stop) for start, stop in places]


@pytest.mark.parametrize(
    ("load_s", "chosen", "pays"),
    # All is 1,000 tokens, a second. 100 of them lie between documents.
    [
        (0.5, None, True), (0.85, None, True), (0.95, None, False),
        # A quarter of the layers of all tokens, and 200 of the documents' own: 0.55 with the gaps.
        (0.4, Chosen(200, 0.25), True), (0.5, Chosen(200, 0.25), False),
    ],
)  # fmt: skip
def test_they_pay_where_they_are_sooner(load_s: float, chosen: Chosen | None, pays: bool) -> None:
    costs = make_costs()
    teach(costs, load_s=load_s, token_s=TOKEN_S)
    found = documents((50, 500), (550, 1000))
    assert costs.passes_pay(found, 0, BYTES, chosen) is pays


def test_they_pay_while_nothing_is_known() -> None:
    assert make_costs().passes_pay(documents((50, 500)), 0, BYTES)


def test_each_pass_reads_the_weights() -> None:
    """A step takes at least as long as one token; of so few a step each gap takes many."""
    costs = make_costs(step_tokens=1)
    teach(costs, load_s=0.0001, token_s=0.00001)
    found = documents((500, 1000))
    assert not costs.passes_pay(found, 0, BYTES)


def test_a_step_with_passes_teaches_what_they_took() -> None:
    heard, clock = Heard(), Clock(100.0)
    steps = StepTimes(heard, clock)
    passing = PassPlan("a", (TokenRun(40, (1, 2, 3)), TokenRun(90, (4,))), ((1,),))
    number = steps.planned(output({}, {}), [passing])
    clock.now += 0.5
    steps.ended(number, 0.0)
    assert heard.steps == [(0.5, [(40, 43), (90, 91)], 0)]


def test_a_step_that_chooses_tokens_teaches_nothing() -> None:
    heard, clock = Heard(), Clock(100.0)
    steps = StepTimes(heard, clock)
    chosen = PassPlan("a", (), ((1,),), Selection((range(9),), 5, range(7)))
    number = steps.planned(output({"b": (0, 100)}, {}), [chosen])
    clock.now += 0.5
    steps.ended(number, 0.0)
    assert heard.steps == []
