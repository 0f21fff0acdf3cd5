# SPDX-License-Identifier: Apache-2.0
"""What look-ups note of a request over several KV cache groups is of what others have left: a
request that is preempted, and finds its own KV, parts from them where it did before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import names_of, sequence_of, tokens_of
from tests.step_world import CHUNK, StepWorld
from tests.vllm_objects import output

SHARED = 3 * CHUNK + 8


def serve(world: StepWorld, request: Any, *, is_preempted: bool) -> None:
    world.come(request)
    run(world, request)
    if is_preempted:
        told = output({}, {})
        told.preempted_req_ids = {request.request_id}
        world.report(world.side.build_step(told))
        request.num_computed_tokens = 0
        run(world, request)
    world.finish(request)
    world.end_step()


def run(world: StepWorld, request: Any) -> None:
    found = world.ask(request)
    while found is None:
        world.end_step()
        found = world.ask(request)
    world.start(request, found)
    world.end_step(request)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_sections_where_a_preempted_request_parts_are_kept(
    monkeypatch: pytest.MonkeyPatch, is_preempted: bool
) -> None:
    """The next one may part there as well, and has nothing else: those of the first are lost."""
    world = StepWorld(monkeypatch, windows=True)
    first = tokens_of(1, 6 * CHUNK)
    world.serve(world.request("first of all", first))
    index = world.store.residency.index
    spine = {bytes(name.key) for name in names_of(sequence_of(first))}
    world.store.drop([chunk for chunk in index if bytes(chunk.name.key) not in spine])
    second = world.request("second", first[:SHARED] + tokens_of(2, 4 * CHUNK))
    serve(world, second, is_preempted=is_preempted)
    third = world.request("third", first[:SHARED] + tokens_of(3, CHUNK))
    world.come(third)
    assert world.ask(third) == SHARED
    world.end(third)
    world.close()
