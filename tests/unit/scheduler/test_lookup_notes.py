# SPDX-License-Identifier: Apache-2.0
"""What look-ups note of a request over several KV cache groups is of what others have left: a
request that is preempted, and finds its own KV, parts from them where it did before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import tokens_of
from tests.step_world import CHUNK, StepWorld
from tests.vllm_objects import output

SHARED = 3 * CHUNK
PROMPT = 7 * CHUNK + 1


def compute(world: StepWorld, request: Any, *stops: int) -> None:
    """Steps of a prompt, which end where vLLM is asked to and at its last whole block."""
    found = world.ask(request)
    while found is None:
        world.end_step()
        found = world.ask(request)
    world.start(request, found)
    for stop in stops:
        if stop > request.num_computed_tokens:
            count = stop - request.num_computed_tokens
            told = {request.request_id: (request.num_computed_tokens, count)}
            world.report(world.side.build_step(output(told, {})))
            request.num_computed_tokens = stop


def answer_in_one_step(world: StepWorld, request: Any) -> None:
    """As far as to the end of a chunk."""
    request.all_token_ids += tokens_of(4, CHUNK)
    world.tables[request.request_id] = list(range(1, 1 + 3 * CHUNK))
    told = {request.request_id: (PROMPT, CHUNK - 1)}
    world.report(world.side.build_step(output({}, told)))
    request.num_computed_tokens = PROMPT + CHUNK - 1


@pytest.mark.parametrize("is_preempted", [False, True])
def test_the_state_where_a_preempted_request_parts_is_kept(
    monkeypatch: pytest.MonkeyPatch, is_preempted: bool
) -> None:
    """The next one may part there as well."""
    world = StepWorld(monkeypatch, states=True)
    first = tokens_of(1, 6 * CHUNK)
    world.serve(world.request("first of all", first))
    second = world.request("second", first[:SHARED] + tokens_of(2, PROMPT - SHARED))
    world.come(second)
    stops = SHARED, PROMPT - 1, PROMPT
    compute(world, second, *stops)
    if is_preempted:
        world.preempt(second)
        compute(world, second, *stops)
        assert second.num_computed_tokens == PROMPT
    answer_in_one_step(world, second)
    world.finish(second)
    world.end_step()
    third = world.request("third", first[:SHARED] + tokens_of(3, 2 * CHUNK))
    world.come(third)
    assert world.ask(third) == SHARED
    world.end(third)
    world.close()
