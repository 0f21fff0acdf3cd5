# SPDX-License-Identifier: Apache-2.0
"""benchmarks.agent_evictions counts chunks that come back and are in no tier, and no others."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from random import Random

import numpy as np

from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from benchmarks.agent_evictions import (
    ARMS,
    Counted,
    Evictions,
    counted,
    every_so_many,
    oracle,
    over,
    verdict,
    with_hints,
)
from benchmarks.edited_contexts import stored

SIZE = 64


def trace_of(*asked: tuple[str, range]) -> Trace:
    """Requests of these sessions for these chunks, one each minute. The last of each ends it."""
    last = {session: number for number, (session, _) in enumerate(asked)}
    requests = [
        TraceRequest(
            60.0 * number, np.array(chunks, np.int64), len(chunks) * SIZE, 1, len(chunks) * SIZE,
            told={"session": session, "ended": last[session] == number},
        )
        for number, (session, chunks) in enumerate(asked)
    ]  # fmt: skip
    return make_trace("made", SIZE, requests)


BACK = trace_of(("a", range(3)), ("b", range(3, 6)), ("a", range(3)))
"""In four slots b takes two of a, which come back; and a two of b, which never do."""


def test_only_what_is_asked_for_again_counts() -> None:
    found = counted(BACK, "lru", 4)
    assert (found.evicted, found.evicted_back, found.came_back) == (4, 2, 2)


def test_what_another_tier_still_has_does_not_count() -> None:
    found = counted(BACK, "lru", 4, nvme=20)
    assert (found.evicted, found.evicted_back, found.came_back) == (0, 0, 0)
    assert found.found > counted(BACK, "lru", 4).found


def test_what_was_evicted_and_saved_again_does_not_count() -> None:
    index, _, (chunk, *_) = stored([1] * 256)
    seen = Evictions(index)
    seen.asked([chunk.name.key])
    seen.gone(chunk.name.key)
    seen.asked([chunk.name.key])
    assert (seen.evicted, seen.evicted_back, seen.came_back) == (1, 0, 0)


def test_what_there_was_no_room_to_save_comes_back_too() -> None:
    found = counted(trace_of(("a", range(5)), ("a", range(5))), "attnstore", 2)
    assert (found.evicted_back, found.came_back) == (0, 3)


def test_each_return_counts_once() -> None:
    a, b = ("a", range(3)), ("b", range(3, 6))
    found = counted(trace_of(a, b, a, a), "lru", 4)
    assert (found.evicted_back, found.came_back) == (2, 2)
    found = counted(trace_of(a, b, a, b, a, b), "lru", 3)
    assert (found.evicted_back, found.came_back) == (4 * 3, 4 * 3)


def test_an_oracle_keeps_what_comes_back_first() -> None:
    found = oracle(BACK, 4)
    assert (found.evicted, found.came_back) == (2, 0)
    assert oracle(BACK, 2).came_back == 1


def test_the_server_hears_the_hints() -> None:
    """a has ended, and b was used before it. Something else comes, then b again."""
    a, b, c = ("a", range(4)), ("b", range(4, 8)), ("c", range(8, 12))
    trace = trace_of(a, b, a, c, b)
    with_none = counted(with_hints(trace, ARMS["none"]), "attnstore", 8)
    ended = counted(with_hints(trace, ARMS["ended"]), "attnstore", 8)
    assert with_none.came_back > ended.came_back == 0


def agents(num_sessions: int, *, quick_s: float, slow_s: float) -> Trace:
    """Coders of ten turns, whose tools are quick or slow, and askers of one. Which it will be shows
    in nothing but what they tell."""
    random, asked, start, new = Random(1), list[TraceRequest](), 0.0, itertools.count()
    for session in range(num_sessions):
        start += random.expovariate(0.05)
        time_s, chunks, is_coder = start, list[int](), random.random() < 0.5
        for turn in range(10 if is_coder else 1):
            chunks += itertools.islice(new, 4 if turn else 8)
            tool = "build" if random.random() < 0.3 else "read"
            told = {"session": str(session), "agent": "coder" if is_coder else "asker"}
            known = len(chunks) * SIZE
            asked.append(
                TraceRequest(
                    time_s, np.array(chunks, np.int64), known, 1, known, told={**told, "tool": tool}
                )
            )
            time_s += random.uniform(0.7, 1.3) * (slow_s if tool == "build" else quick_s)
    return make_trace("made", SIZE, sorted(asked, key=lambda request: request.arrival_s))


def test_tools_of_known_length_are_waited_for() -> None:
    trace = agents(150, quick_s=4.0, slow_s=600.0)
    slots = trace.num_chunks // 4
    none, told = (
        counted(with_hints(trace, ARMS[arm]), "attnstore", slots)
        for arm in ("none", "session, tool")
    )
    assert 0 < told.came_back < 0.7 * none.came_back


def test_what_a_recorded_session_tells(tmp_path: Path) -> None:
    def at(seconds: float, asked: str) -> dict[str, object]:
        return {"t": seconds, "in": 256, "out": 1, "model": "m", "input_types": [asked],
                "hash_rle": [[1, 4]]}  # fmt: skip

    agent = {"t": 2, "subagent_type": "Explore", "requests": [at(0, "text")]}
    session = {"block_size": 64, "requests": [at(0, "text"), at(1, "tool_result"), agent]}
    file = tmp_path / "t"
    file.write_text("\n".join([json.dumps(session)] * 2))
    trace = read_trace(file, Arrivals(sessions_s=0.001))
    first = every_so_many(trace, 3)
    assert [dict(request.told) for request in first.requests] == [
        {"session": "0/main", "agent": "m", "tool": "words", "ended": False},
        {"session": "0/main", "agent": "m", "tool": "result", "ended": True},
        {"session": "0/main/2", "parent": "0/main", "agent": "Explore", "tool": "words",
         "ended": True},
    ]  # fmt: skip
    assert len(every_so_many(trace, 6).requests) == 6
    said = with_hints(first, ARMS["ended"]).requests[2].hints
    assert said == {"attnstore": {"session": "0/main/2", "parent": "0/main", "ended": True}}


def test_the_verdict_names_capacities() -> None:
    rows = [
        {"dram": dram, "hints": arm, "over_none": ratio}
        for dram, ratios in ((0.1, (0.9, 0.6)), (0.2, (0.8, 0.5)), (0.5, (0.4, 0.1)))
        for arm, ratio in zip(("ended", "oracle"), ratios, strict=True)
    ]
    assert verdict(rows, "over_none") == (
        "0.5 over none: hints reach it at 50%, the oracle at 20%, 50%"
    )
    assert over(Counted(9, 3, 3, 0.5), Counted(9, 6, 6, 0.5)) == 0.5
    assert over(Counted(9, 3, 3, 0.5), Counted(0, 0, 0, 0.5)) is None
