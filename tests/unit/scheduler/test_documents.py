# SPDX-License-Identifier: Apache-2.0
"""What steps compute between the documents of a request: within their budget, each token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnstore_vllm.config.settings import RecomputeBy, TruncationConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.index.prefix import gaps_of
from attnstore_vllm.scheduler.documents import (
    COMPARED_LAYERS,
    DEEP_LAYERS,
    FULL_STEPS_MAX,
    PASSES_DEADLINE_S,
    PASSES_MAX,
    Documents,
    settled,
)
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER

LAYERS = 8
GAPS = [range(10), range(40, 52), range(90, 91)]
NONE_ANEW = TruncationConfig(documents=True, recompute=0.0)
CHOOSES = TruncationConfig(documents=True, recompute=0.25, recompute_by="deviation")


class Plans:
    """As much of OpenPlans as is called."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.received: list[str] = []
        self.failed: list[str] = []
        self.clock: Any = None

    def is_open(self, plan_id: int) -> bool:
        return plan_id in self.open

    def load(
        self, request_id: str, chunks: Sequence[Any], copies: Any, *, has_failed: bool, **_: Any
    ) -> int:
        assert not chunks and not copies, "a last part brings nothing"
        (self.failed if has_failed else self.received).append(request_id)
        return 99


def state_of(name: str, num_tokens: int = 1000) -> Any:
    request = SimpleNamespace(request_id=name, all_token_ids=list(range(num_tokens)))
    return SimpleNamespace(request=request, load_has_failed=lambda _: None)


def begun(plans: Plans, tokens: int, rows: int, config: TruncationConfig = NONE_ANEW) -> Documents:
    engine = EngineFacts(pass_tokens=tokens, pass_rows=rows)
    clock = SimpleNamespace(now=0.0)
    documents = Documents(cast("OpenPlans", plans), engine, config, LAYERS, lambda: clock.now)
    plans.open.add(1)
    plans.clock = clock
    documents.begin(state_of("a"), 1, GAPS, ((1, 2, 3),), range(100))
    return documents


@pytest.mark.parametrize(("tokens", "rows"), [(5, 9), (8, 1), (100, 2), (100, 9)])
def test_steps_compute_each_token_once_within_their_budget(tokens: int, rows: int) -> None:
    plans = Plans()
    documents = begun(plans, tokens + 3, rows)
    assert documents.plan(3, StepStats()) == [], "its documents are still being loaded"
    plans.open.clear()
    computed: list[int] = []
    while documents.is_open:
        assert plans.received == []
        (one,) = documents.plan(3, StepStats())
        found = [token for run in one.runs for token in run.token_ids]
        assert 0 < len(found) <= tokens and len(one.runs) <= rows
        assert all(run.token_ids[0] == run.start for run in one.runs)
        computed += found
    assert computed == [*range(10), *range(40, 52), 90]
    assert plans.received == ["a"], "with its last pass"


def test_a_full_step_computes_nothing() -> None:
    plans = Plans()
    documents = begun(plans, 8, 4)
    plans.open.clear()
    assert documents.plan(8, StepStats()) == documents.plan(20, StepStats()) == []
    assert documents.is_loading("a") and not plans.received


def test_steps_that_stay_full_compute_in_the_end() -> None:
    plans = Plans()
    documents = begun(plans, 8, 4)
    plans.open.clear()
    found = [bool(documents.plan(8, StepStats())) for _ in range(3 * (FULL_STEPS_MAX + 1))]
    assert found == 3 * [*FULL_STEPS_MAX * [False], True]


def test_what_takes_too_long_is_computed_by_vllm() -> None:
    plans = Plans()
    documents = begun(plans, 8, 4)
    plans.clock.now = 10 * PASSES_DEADLINE_S  # the load's own time does not count
    plans.open.clear()
    assert documents.plan(0, StepStats())
    plans.clock.now += PASSES_DEADLINE_S
    stats = StepStats()
    assert documents.plan(0, stats) == []
    assert plans.failed == ["a"] and not documents.is_open
    assert stats.data["counters"] == {"recomputations:deadline": 1}


@pytest.mark.parametrize(("tokens", "rows"), [(5, 9), (8, 1), (1000, 9)])
def test_two_layers_of_all_are_compared_before_some_are_chosen(tokens: int, rows: int) -> None:
    plans = Plans()
    documents = begun(plans, tokens + 3, rows, CHOOSES)
    plans.open.clear()
    compared: list[int] = []
    parts: list[int] = []
    number = -(-(100 - 23) // 4)
    while documents.is_open:
        cost = 0.0
        for one in documents.plan(3, StepStats()):
            assert one.selection is not None
            assert (one.selection.gaps, one.selection.num_chosen) == (tuple(GAPS), number)
            if one.selection.part:
                assert not one.runs and len(compared) == 100
                parts += one.selection.part
                cost += len(one.selection.part)
            else:
                compared += [token for run in one.runs for token in run.token_ids]
                cost += sum(len(run.token_ids) for run in one.runs) * COMPARED_LAYERS / LAYERS
        assert 0 < cost <= tokens
    assert compared == list(range(100))
    assert parts == list(range(23 + number))
    assert plans.received == ["a"]


@pytest.mark.parametrize(
    ("given", "layers", "means"),
    [
        ("auto", DEEP_LAYERS - 1, "first"), ("auto", DEEP_LAYERS, "deviation"),
        ("first", 80, "first"), ("deviation", COMPARED_LAYERS, "first"),
        ("deviation", COMPARED_LAYERS + 1, "deviation"),
    ],
)  # fmt: skip
def test_which_tokens_a_model_of_so_many_layers_computes(
    given: RecomputeBy, layers: int, means: RecomputeBy
) -> None:
    config = TruncationConfig(documents=True, recompute=0.3, recompute_by=given)
    assert settled(config, layers) == replace(config, recompute_by=means)


def test_a_step_has_few_passes_however_many_requests_wait() -> None:
    plans = Plans()
    documents = begun(plans, 1000, 99)
    for number in range(2, 9):
        documents.begin(state_of(str(number)), number, [range(3)], ((4, 5),), range(30))
    plans.open.clear()
    while documents.is_open:
        assert 0 < len(documents.plan(0, StepStats())) <= PASSES_MAX
    assert plans.received == ["a", *map(str, range(2, 9))]


@pytest.mark.parametrize("rows", [1, 4])
def test_chosen_tokens_fit_the_rows_of_a_pass(rows: int) -> None:
    """They stand in groups, each in a row."""
    plans = Plans()
    documents = begun(plans, 1000, rows, CHOOSES)
    plans.open.clear()
    parts = []
    while documents.is_open:
        found = [one.selection for one in documents.plan(0, StepStats()) if one.selection]
        parts += [one.part for one in found if one.part]
    assert max(map(len, parts)) == rows * CHOSEN_TOGETHER
    assert sum(map(len, parts)) == 23 + -(-(100 - 23) // 4)


def test_the_next_request_has_what_the_first_leaves() -> None:
    plans = Plans()
    documents = begun(plans, 30, 9)
    documents.begin(state_of("b"), 2, [range(20)], ((4, 5),), range(30))
    plans.open.clear()
    first = documents.plan(0, StepStats())
    assert [(p.request_id, [len(r.token_ids) for r in p.runs]) for p in first] == [
        ("a", [10, 12, 1]), ("b", [7]),
    ]  # fmt: skip
    (rest,) = documents.plan(0, StepStats())
    assert (rest.request_id, rest.runs[0].start, rest.block_ids) == ("b", 7, ((4, 5),))
    assert plans.received == ["a", "b"]


def test_of_a_request_that_has_ended_nothing_more_is_computed() -> None:
    plans = Plans()
    documents = begun(plans, 8, 9)
    documents.ended("a")
    documents.ended("another")
    assert documents.plan(0, StepStats()) == []
    assert documents.is_open, "its blocks are still being filled"
    plans.open.clear()
    assert documents.plan(0, StepStats()) == []
    assert plans.received == ["a"] and not documents.is_open


def test_gaps() -> None:
    def pieces(*places: tuple[int, int]) -> Any:
        return [SimpleNamespace(start=start, stop=stop) for start, stop in places]

    assert gaps_of(pieces(), 3, 9) == [range(3, 9)]
    assert gaps_of(pieces((0, 4), (4, 6), (8, 10)), 0, 10) == [range(6, 8)]
    assert gaps_of(pieces((5, 10), (20, 40)), 0, 30) == [range(5), range(10, 20)]
    assert gaps_of(pieces((5, 10), (20, 40)), 0, 15) == [range(5), range(10, 15)]
