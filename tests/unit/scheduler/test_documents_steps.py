# SPDX-License-Identifier: Apache-2.0
"""Requests with documents, from their coming to their end, over the real scheduler side: which
tokens passes compute, what a failed pass leaves, and what steps with passes tell of costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.index.prefix import whole_blocks
from attnstore_vllm.policy.cost import StepCost
from attnstore_vllm.scheduler.documents import COMPARED_LAYERS
from attnstore_vllm.types import Cause
from tests.step_world import StepWorld
from tests.vllm_objects import output

LAYERS, SHARE = 8, 0.25
SHARED = list(range(100, 164))
DOCUMENT = list(range(1000, 1128))
QUESTION = list(range(7000, 7040))

Start = Callable[[str], StepWorld]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    worlds: list[StepWorld] = []

    def make(recompute_by: Any) -> StepWorld:
        config = TruncationConfig(
            enabled=True, shared_by="everyone", documents=True, recompute_by=recompute_by,
            recompute=SHARE if recompute_by == "deviation" else 0.0,
        )  # fmt: skip
        world = StepWorld(
            monkeypatch, truncation=config, why_not_moved=None, why_no_passes=None,
            pass_tokens=1024, pass_rows=16, layers=LAYERS,
        )  # fmt: skip
        worlds.append(world)
        world.serve(world.request("shared", [*SHARED, *range(20, 60)]))
        world.serve(world.request("document", [*range(50), *DOCUMENT, *range(60, 90)]))
        world.rig.until_idle()
        return world

    yield make
    for world in worlds:
        world.close()


def offered(world: StepWorld, tokens: Sequence[int]) -> tuple[Any, Any]:
    """The request that has been offered documents and has taken them, and the step's plan."""
    asks = {"attnstore": {"report": True}}
    request = world.request("asks", tokens, kv_transfer_params=asks)
    world.come(request)
    found = world.answer(request)
    assert found >= len(DOCUMENT)
    world.start(request, found)
    plan = world.side.build_step(output({}, {}))
    world.report(plan)
    return request, plan


@pytest.mark.parametrize("gap", [0, 20])
def test_tokens_are_chosen_of_a_document_with_no_gap_before_it(gap: int, start: Start) -> None:
    world = start("deviation")
    tokens = [*SHARED, *range(500, 500 + gap), *DOCUMENT, *QUESTION]
    _, plan = offered(world, tokens)
    (load,) = plan.loads
    assert load.has_more, "it is received behind its passes"
    num_moved = world.side.requests["asks"].moved_tokens
    passes = world.side.build_step(output({}, {})).passes
    compared = [token for one in passes for run in one.runs for token in run.token_ids]
    assert compared == tokens[len(SHARED) : len(SHARED) + gap + num_moved]
    computed = [n for one in passes if one.selection for n in one.selection.part]
    assert computed == list(range(gap + -(-num_moved // 4)))


def fail(world: StepWorld, request: Any) -> None:
    """A worker says that a pass has failed; vLLM takes the blocks away, and asks again."""
    last = world.side.build_step(output({}, {}))
    assert last.passes and last.loads
    world.side.on_failed_requests([request.request_id])
    world.report(last)
    request.num_computed_tokens = 0


def test_a_request_whose_pass_has_failed_is_as_one_that_was_never_offered(start: Start) -> None:
    world = start("first")
    request, _ = offered(world, [*range(500, 520), *DOCUMENT, *QUESTION])
    exact = world.request("exact", request.all_token_ids).block_hashes
    assert request.block_hashes != exact, "moved KV is hidden"
    fail(world, request)
    assert world.ask(request) == 0
    assert request.block_hashes == exact, "others may have what it computes now"
    world.start(request, 0)
    world.end_step(request)
    said = world.end(request)
    assert said is not None
    found = said["attnstore"]
    assert found["why_computed"] == Cause.COPY_FAILED.value
    assert (found["moved_tokens"], found["own_pass_tokens"], found["dram_tokens"]) == (0, 0, 0)
    assert found["computed_tokens"] == request.num_prompt_tokens
    world.end_step()
    plain = world.request("plain", request.all_token_ids)
    assert world.serve(plain) >= whole_blocks(request.num_tokens), "it is stored"
    world.side.check_quiet()


def test_steps_whose_passes_choose_tokens_tell_nothing_of_costs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chosen part has no runs, and of compared ones some layers alone are computed."""
    world = start("deviation")
    observed: list[tuple[Any, int]] = []

    def note(_: StepCost, seconds: float, prompts: Any, num_generating: int) -> None:
        observed.append((list(prompts), num_generating))

    monkeypatch.setattr(StepCost, "observe", note)
    offered(world, [*SHARED, *range(500, 520), *DOCUMENT, *QUESTION])
    observed.clear()
    world.report(world.side.build_step(output({}, {})))
    assert COMPARED_LAYERS < LAYERS and observed == []
