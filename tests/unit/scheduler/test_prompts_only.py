# SPDX-License-Identifier: Apache-2.0
"""Models of which vLLM takes blocks of generated tokens back (R-SWA): of a request the prompt that
it came with is stored. What follows it in a session is the next input's prompt to vLLM, and is not
KV that the same text would have as a prompt: its blocks may be gone, and it saw a window alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers import tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.vllm_objects import output


def test_answers_of_a_session_are_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = StepWorld(monkeypatch)
    world.side.geometry = replace(world.side.geometry, prompts_only=True)
    session = world.request("session", tokens_of(1, 2 * CHUNK + 5), resumable=True)
    world.come(session)
    world.start(session, world.answer(session))
    world.end_step(session)
    # Its answer, without the token that was sampled last, and the next input.
    before = session.num_tokens
    session.all_token_ids += tokens_of(2, 3 * CHUNK)
    session.num_prompt_tokens = session.num_tokens
    session.arrival_time = 1.0
    blocks = list(range(1, 2 + session.num_tokens // BLOCK))
    world.tables["session"] = [*blocks[: before // BLOCK], *[0] * CHUNK, *blocks[-CHUNK:]]
    told = {"session": (before, session.num_tokens - before)}
    world.report(world.side.build_step(output({}, told)))
    session.num_computed_tokens = session.num_tokens
    world.finish(session)
    world.end_step()
    assert sorted(chunk.name.position for chunk in world.store.residency.index) == [0, CHUNK]
    world.close()
