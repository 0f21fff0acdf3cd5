# SPDX-License-Identifier: Apache-2.0
"""A whole replay over a real HTTP server: open loop, both clocks, limits, and interruption.

Times are compared with sleeps of the server, and only in the direction in which a busy machine
moves them; what must be exact are the due times.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from attnstore_lab.bench.client import RequestSettings
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.open_loop import OpenLoop
from attnstore_lab.bench.records import TurnRecord
from attnstore_lab.bench.replay import ReplayOutcome, replay
from attnstore_lab.bench.schedule import Load, Think, make_plan, sessions
from attnstore_vllm.errors import ConfigError
from tests.fake_openai import Fake, Handler, serving

SETTINGS = RequestSettings(model="m", max_tokens=4, timeout_s=10)
SINGLES = [Conversation(str(n), ("hello",)) for n in range(12)]
NO_THINK = Think(kind="constant")
Rows = list[dict[str, Any]]


def held(
    path: Path,
    handler: Handler,
    conversations: list[Conversation],
    load: Load,
    settings: RequestSettings = SETTINGS,
    **options: Any,
) -> tuple[ReplayOutcome, Rows]:
    """A replay and its records, by due time."""
    records = path / "records.jsonl"

    async def session() -> ReplayOutcome:
        async with serving(handler) as url:
            return await replay(
                url, conversations, load, settings, records=records, progress=False, **options
            )

    outcome = asyncio.run(session())
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    return outcome, sorted(rows, key=lambda row: row["due_ms"] if row["due_ms"] is not None else -1)


def test_slow_server_is_asked_at_the_same_times(tmp_path: Path) -> None:
    """One request at a time, 50 ms each, 12 due within 60 ms or so: the clock of those who wait
    shows the queue, the server's own does not."""
    load = Load(rate=200)
    planned = [round(session.start_s * 1e3, 3) for session in sessions(SINGLES, load)]
    _, fast = held(tmp_path, Fake(), SINGLES, load)
    _, slow = held(tmp_path, Fake(first_s=0.05), SINGLES, load, max_concurrency=1)
    assert [row["due_ms"] for row in fast] == planned
    assert [row["due_ms"] for row in slow] == planned
    waited = [row["due_ttft_ms"] for row in slow]
    assert waited[-1] >= 12 * 50 - planned[-1] - 5
    assert waited[-1] > 3 * statistics.median(row["ttft_ms"] for row in slow)
    for row in slow:
        parts = row["wait_answer_ms"] + row["wait_limit_ms"] + row["lag_ms"]
        assert row["delay_ms"] == pytest.approx(parts, abs=0.01)
        assert row["due_ttft_ms"] == pytest.approx(row["delay_ms"] + row["ttft_ms"], abs=0.01)
        assert row["lag_ms"] >= -0.01
    assert slow[-1]["wait_limit_ms"] > 300


def test_requests_are_sent_while_none_is_answered(tmp_path: Path) -> None:
    fake = Fake(first_s=1.0)
    _, rows = held(tmp_path, fake, SINGLES, Load(rate=200))
    assert max(fake.came_s) < min(fake.first_token_s)
    assert fake.most == len(SINGLES)
    assert all(row["wait_limit_ms"] < 500 for row in rows)


def test_stall_is_seen_by_all_who_came_in_it(tmp_path: Path) -> None:
    """A load generator that waits for answers would have one slow request, and hide the rest."""
    _, rows = held(tmp_path, Fake(stall_s=(0.0, 0.6)), SINGLES, Load(rate=100))
    in_it = [row for row in rows if row["due_ms"] < 200]
    assert len(in_it) > 6
    assert all(row["due_ttft_ms"] > 300 for row in in_it)


def test_question_that_is_due_before_the_answer_waits_for_it(tmp_path: Path) -> None:
    two = [Conversation("c", ("a", "b"))]
    load = Load(think=Think(kind="constant", first=0.05))
    _, [first, second] = held(tmp_path, Fake(first_s=0.2), two, load)
    assert second["due_ms"] == 50
    assert second["start_time_ms"] >= first["start_time_ms"] + first["latency_ms"]
    assert second["wait_answer_ms"] >= 140
    assert second["due_ttft_ms"] >= 340


def test_thinking_may_begin_with_the_answer(tmp_path: Path) -> None:
    two = [Conversation("c", ("a", "b"))]
    load = Load(think=Think(kind="constant", first=0.1), after_answer=True)
    _, [first, second] = held(tmp_path, Fake(first_s=0.1), two, load)
    assert second["wait_answer_ms"] == 0
    end_ms = first["start_time_ms"] + first["latency_ms"]
    assert second["due_ms"] - end_ms + 0.01 >= 100
    assert second["due_ms"] - end_ms < 1000


def test_what_the_program_itself_is_late_is_told() -> None:
    """Its event loop is blocked while the second request is due."""
    load, records = Load(rate=5), list[TurnRecord]()
    due_s = list(sessions(SINGLES[:2], load))[1].start_s
    assert 0.05 < due_s < 0.5

    def emit(record: TurnRecord) -> None:
        records.append(record)
        if len(records) == 1:
            time.sleep(due_s + 0.2)

    async def session() -> None:
        plan = make_plan(SINGLES[:2], load)
        async with serving(Fake()) as url:
            await OpenLoop(url, SINGLES[:2], load, plan, SETTINGS, emit).run()

    asyncio.run(session())
    late = max(records, key=lambda record: record.due_ms or 0)
    assert late.due_ms == pytest.approx(due_s * 1e3)
    assert late.lag_ms is not None
    assert late.lag_ms > 190
    assert late.wait_limit_ms < 100


def test_concurrency_is_limited(tmp_path: Path) -> None:
    fake = Fake(first_s=0.03)
    held(tmp_path, fake, SINGLES, Load(rate=math.inf), max_concurrency=3)
    assert fake.most == 3


def test_warm_up_is_sent_and_left_out_of_the_summary(tmp_path: Path) -> None:
    """The first four of twelve break off; one at a time, so that they are those due first."""
    fake = Fake(fails=frozenset(range(4)))
    load = Load(rate=500, warmup=0.34)
    outcome, rows = held(tmp_path, fake, SINGLES, load, max_concurrency=1)
    assert len(fake.bodies) == 12
    assert [row["warmup"] for row in rows] == [True] * 4 + [False] * 8
    assert [row["error"] is not None for row in rows] == [True] * 4 + [False] * 8
    result = outcome.to_json()
    assert result["statistics"]["ttft_ms"]["count"] == 8
    assert result["statistics"]["lag_ms"]["count"] == 8
    assert (result["requests"]["failed"], result["requests"]["warmup_failed"]) == (0, 4)
    first_ms = min(row["start_time_ms"] for row in rows if not row["warmup"])
    last_ms = max(row["start_time_ms"] + row["latency_ms"] for row in rows)
    assert result["runtime_sec"] == pytest.approx((last_ms - first_ms) / 1e3, abs=0.002)


def test_records_have_the_answers_only_if_asked(tmp_path: Path) -> None:
    talk = [Conversation("c", ("a", "b"))]
    load = Load(think=NO_THINK)
    outcome, rows = held(tmp_path, Fake(), talk, load)
    assert [(row["conversation_id"], row["session"], row["turn"]) for row in rows] == [
        ("c", 0, 1),
        ("c", 0, 2),
    ]
    assert "answer" not in rows[0]
    assert outcome.to_json()["planned"] == {
        "sessions": 1,
        "requests": 2,
        "warmup": 0,
        "last_due_s": 0.0,
    }
    _, rows = held(tmp_path, Fake(), talk, load, answers=True)
    assert [row["answer"] for row in rows] == ["1..", "3.."]


def test_conversation_that_is_held_again_begins_differently(tmp_path: Path) -> None:
    fake = Fake()
    load = Load(rate=math.inf, sessions=3, think=NO_THINK)
    _, rows = held(tmp_path, fake, SINGLES[:1], load, max_concurrency=1)
    said = [body["messages"][0]["content"] for body in fake.bodies]
    assert said == ["hello", "(1) hello", "(2) hello"]
    assert {row["conversation_id"] for row in rows} == {"0", "0#2", "0#3"}


def test_failed_turn_ends_its_conversation_and_no_other(tmp_path: Path) -> None:
    talks = [Conversation("x", ("a", "b", "c")), Conversation("y", ("a", "b"))]
    fake = Fake(fails=frozenset({0}))
    load = Load(rate=math.inf, think=NO_THINK)
    outcome, rows = held(tmp_path, fake, talks, load, max_concurrency=1)
    failed = next(row for row in rows if row["turn"] == 1 and row["error"])
    rest = [row for row in rows if row["conversation_id"] == failed["conversation_id"]]
    others = [row for row in rows if row not in rest]
    assert {row["error"] for row in rest if row["turn"] > 1} == {"not sent, because turn 1 failed"}
    assert not any(row["error"] for row in others)
    assert outcome.to_json()["requests"]["failed"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_keeps_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    fake = Fake()

    async def handler(request: web.Request) -> web.StreamResponse:
        if len(fake.came_s) == 3:
            os.kill(os.getpid(), number)
            await asyncio.sleep(10)
        return await fake(request)

    before = signal.getsignal(number)
    started = time.perf_counter()
    load = Load(rate=100)
    outcome, rows = held(tmp_path, handler, SINGLES, load, max_concurrency=1)
    assert time.perf_counter() - started < 5
    assert outcome.interrupted
    assert [row["error"] for row in rows] == [None] * 3 + ["interrupted"]
    assert outcome.to_json()["requests"]["interrupted"] == 1
    assert outcome.summary.num_failed == 0
    assert signal.getsignal(number) == before


def test_full_disk_ends_the_run_and_keeps_its_numbers() -> None:
    async def session() -> ReplayOutcome:
        async with serving(Fake()) as url:
            full = Path("/dev/full")
            return await replay(url, SINGLES, Load(rate=5), SETTINGS, records=full, progress=False)

    outcome = asyncio.run(session())
    assert outcome.trouble == "/dev/full: No space left on device"
    assert outcome.summary.requests["answered"] == 1


def test_ids_for_chat_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    fake = Fake()
    mixed = [*SINGLES, Conversation("i", (array("I", [1]),))]
    load = Load(rate=100, seed=2)
    assert next(sessions(mixed, load)).conversation != 12  # it would come later
    with pytest.raises(ConfigError, match="i: --api chat wants texts"):
        held(tmp_path, fake, mixed, load)
    assert fake.bodies == []
