# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.agent_hints counts, and its verdict."""

from __future__ import annotations

import numpy as np
import pytest

from attnstore_lab.sim.pools import ByReturnPool
from attnstore_lab.sim.trace import AgentWords, Trace, TraceRequest, make_trace
from benchmarks.agent_hints import ARMS, GOAL, measure, replay, terms_of, verdict

SIZE = 64


def trace(sessions: int = 60, turns: int = 4) -> Trace:
    """Sessions of one chunk more each turn, at their times, and each over after its last turn."""
    requests = []
    for session in range(sessions):
        for turn in range(turns):
            chunks = np.arange(turn + 2) + 1000 * session
            tokens = SIZE * (turn + 2)
            words = AgentWords("coder", "result", "tool_use", turn == turns - 1)
            at = 20.0 * session + 100.0 * turn
            requests.append(TraceRequest(at, chunks, tokens, 10, tokens, words=words))
    return make_trace("made up", SIZE, requests)


def test_what_was_evicted_and_is_asked_for_again_counts() -> None:
    found = replay(trace(), "none", 0.05)
    assert 0 < found.came_back <= found.chunks
    assert replay(trace(), "none", 1.0).chunks == 0


def test_a_session_that_is_said_to_be_over_makes_room() -> None:
    assert replay(trace(), "ended", 0.2).came_back < replay(trace(), "none", 0.2).came_back


def test_without_hints_a_replay_evicts_as_the_simulated_pool_does() -> None:
    """It has always called the policy with no word of sessions, tools or agents."""
    made_up, capacity = trace(), 0.2
    num_slots = int(made_up.num_chunks * capacity)
    pool, gone = ByReturnPool(num_slots, made_up), set[int]()
    stored, came_back = set[int](), 0
    for request in made_up.requests:
        chunks = request.chunks.tolist()
        came_back += sum(chunk in gone for chunk in chunks)
        gone.difference_update(chunks)
        found = next((n for n, chunk in enumerate(chunks) if chunk not in pool), len(chunks))
        pool.store(request, chunks, found)
        stored.update(chunks)
        gone |= {chunk for chunk in stored if chunk not in pool}
    assert replay(made_up, "none", capacity).came_back == came_back


def test_each_arm_says_what_it_is_for() -> None:
    last = trace().requests[-1]
    said = {arm: terms_of(last, arm) for arm in ARMS}
    assert said["none"].told is None
    assert said["tool"].told == (b"", "coder", "result")
    assert said["ending"].told == (b"", None, None)
    assert said["ended"].priority < said["ending"].priority


@pytest.mark.parametrize(("over", "is_reached"), [(GOAL, True), (GOAL + 0.01, False)])
def test_the_verdict_is_of_the_goal(over: float, *, is_reached: bool) -> None:
    rows = [{"capacity": 0.2, "hints": "ended", "over_without": over}]
    assert ("reached" in verdict(rows)) == is_reached


def test_all_arms_are_measured_at_each_size() -> None:
    rows = measure(trace(12))
    assert [row["hints"] for row in rows] == [*ARMS, *ARMS]
