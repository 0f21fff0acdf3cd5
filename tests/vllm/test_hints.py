# SPDX-License-Identifier: Apache-2.0
"""Hints and prefetch orders on the scheduler side, under vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.index.prefix import whole_blocks
from tests.helpers import wait_until
from tests.vllm.scripted import CHUNK, ScriptedEngine

PROMPT = [n % 47 for n in range(3 * CHUNK + 20)]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(
        model,
        tmp_path / "store",
        num_blocks=64,
        depth=2,
        seed=1,
        pinning={"share": 0.5, "tenant_share": 0.5},
    )
    try:
        yield engine
        wait_until(engine.ours.store.is_idle, engine.ours.store)
        engine.ours.check_quiet()
    finally:
        engine.close()


def run(engine: ScriptedEngine, name: str, prompt: list[int], **hints: Any) -> None:
    engine.add(name, prompt, 4, params={"attnstore": hints} if hints else None)
    engine.drain()


def counts(engine: ScriptedEngine, name: str) -> dict[str, float]:
    """Of the metrics since the last time, by label."""
    found = engine.ours.take_stats().data["counters"]
    return {key.partition(":")[2]: n for key, n in found.items() if key.startswith(f"{name}:")}


def test_what_is_not_to_be_stored_is_not(engine: ScriptedEngine) -> None:
    run(engine, "a", PROMPT, store=False)
    assert engine.ours.store.figures().counts.get("saved", 0) == 0
    run(engine, "b", PROMPT)
    assert engine.ours.store.figures().counts["saved"] == 4
    counts(engine, "hints")
    engine.add("c", PROMPT[:50], 4, params={"attnstore": {"store": "no", "priority": "high"}})
    assert counts(engine, "hints") == {"applied": 1, "ignored": 1}
    engine.drain()


def report_of(engine: ScriptedEngine, name: str, prompt: list[int]) -> dict[str, Any]:
    """What the response would say."""
    said = []
    finished = engine.ours.request_finished

    def keep(*arguments: Any) -> Any:
        keeps, found = finished(*arguments)
        said.append(found)
        return keeps, found

    engine.ours.request_finished = keep
    run(engine, name, prompt, report=True)
    engine.ours.request_finished = finished
    (found,) = said
    return dict(found["attnstore"])


def test_a_report_says_where_the_prompt_came_from(engine: ScriptedEngine) -> None:
    length, found = len(PROMPT), whole_blocks(len(PROMPT) - 1)
    first = report_of(engine, "a", PROMPT)
    assert (first["computed_tokens"], first["why_computed"]) == (length, "not_stored")
    in_hbm = report_of(engine, "b", PROMPT)
    assert in_hbm["hbm_tokens"] + in_hbm["dram_tokens"] == found
    assert in_hbm["hbm_tokens"] > 0
    assert engine.scheduler.reset_prefix_cache()
    loaded = report_of(engine, "c", PROMPT)
    assert (loaded["hbm_tokens"], loaded["dram_tokens"]) == (0, found)
    assert (loaded["computed_tokens"], loaded["why_computed"]) == (length - found, None)
    assert loaded["prompt_tokens"] == length and loaded["waited_ms"] == 0


def test_the_prompt_is_pinned_and_the_answer_is_not(engine: ScriptedEngine) -> None:
    engine.add("a", PROMPT, 3 * CHUNK, params={"attnstore": {"pin": True, "ttl": "1h"}})
    engine.drain()
    dram = engine.ours.store.residency.dram
    pinned = {dram.owned[slot].name.position for slot in dram.pins}
    assert pinned == {0, CHUNK, 2 * CHUNK, 3 * CHUNK}
    assert len(dram.owned) > len(pinned)


def test_terms_are_of_the_runs_that_are_saved(engine: ScriptedEngine) -> None:
    run(engine, "a", PROMPT, priority="low", ttl=90)
    runs = {chunk.run for chunk in engine.ours.store.residency.dram.owned.values()}
    assert {(run.priority, run.lease.ttl_s) for run in runs if run.lease} == {(-1, 90.0)}
    assert all(run.lease for run in runs)


def test_an_order_is_no_request(engine: ScriptedEngine) -> None:
    """It enters no queue, holds nothing, computes nothing, and says what it found."""
    run(engine, "a", PROMPT)
    counts(engine, "prefetches")
    for number, (prompt, salt) in enumerate([(PROMPT, None), (PROMPT, "salt"), ([5] * 99, None)]):
        order = PrefetchOrder(prompt, salt).as_params()
        engine.add(f"order {number}", [0], 1, params=order)
        assert engine.ours.requests == {}
        assert list(engine.ours.store.residency.look_ahead) == []
        engine.abort(f"order {number}")  # vLLM does, before the next step
    output = engine.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    found = engine.ours.take_stats().data["counters"]
    assert (found["prefetches:hit"], found["prefetches:miss"]) == (1, 2)
    assert found["prefetch_tokens:dram"] == whole_blocks(len(PROMPT))


def test_who_is_preempted_may_wait_anew(engine: ScriptedEngine) -> None:
    prompts = [[(n * k) % 47 for n in range(250)] for k in (1, 2, 3)]
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, 200)
    preempted = 0
    while engine.scheduler.has_requests():
        running = [s for s in engine.ours.requests.values() if s.request.num_computed_tokens]
        for state in running:
            state.waiting.deadline, state.waiting.is_answered = 1.0, True
        engine.step()
        for state in running:
            if state.request.num_preemptions and not state.request.num_computed_tokens:
                preempted += 1
                assert state.waiting.deadline is None
                assert not state.waiting.is_answered
        engine.check_queue()
    engine.drain()
    assert preempted


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": True}, {"attnstore": [[]]}], ids=repr)
def test_others_params_are_left_as_they_are(engine: ScriptedEngine, params: dict[str, Any]) -> None:
    before = repr(params)
    engine.add("a", PROMPT, 4, params=params)
    engine.drain()
    assert repr(params) == before
    assert engine.ours.store.figures().counts["saved"] == 4


def left_of(engine: ScriptedEngine, first: int) -> set[int]:
    """Priorities of the chunks whose prompt begins with this token."""
    residency = engine.ours.store.residency
    found = [*residency.dram.owned.values()]
    by_start = {bytes(chunk.name.tokens[:4]): chunk for chunk in found if not chunk.name.position}
    roots = {chunk.run.number for start, chunk in by_start.items() if start[3] == first}
    return {int(chunk.run.priority) for chunk in found if chunk.run.number in roots}


@pytest.mark.parametrize("salt", ["one", None])
def test_a_session_ends_by_its_id_for_its_own_salt_alone(
    engine: ScriptedEngine, salt: str | None
) -> None:
    def serve(name: str, first: int, salt: str | None, session: str, **hints: Any) -> None:
        request = engine.make_request(
            name, [first, *PROMPT[1:]], 4, params={"attnstore": hints} if hints else None, salt=salt
        )
        request.session_id = session
        engine.scheduler.add_request(request)
        engine.drain()

    serve("a", 1, salt, "main")
    serve("b", 2, salt, "child", parent="main")
    serve("c", 3, "other", "main")
    serve("d", 4, salt, "another")
    assert [left_of(engine, first) for first in (1, 2, 3, 4)] == [{0}] * 4
    serve("e", 5, salt, "main", ended=True)
    ended = [left_of(engine, first) for first in (1, 2, 3, 4, 5)]
    assert ended == [{-3}, {-3}, {0}, {0}, {-3}]
    serve("f", 1, salt, "main")
    assert left_of(engine, 1) == {0}, "it has come back"


def test_what_a_session_has_left_is_the_first_to_go(engine: ScriptedEngine) -> None:
    for number in range(3):
        request = engine.make_request(str(number), [number + 1, *PROMPT[1:]], 4)
        request.session_id = f"session {number}"
        engine.scheduler.add_request(request)
        engine.drain()
    engine.add(
        "end",
        [9] * 20,
        1,
        params={"attnstore": {"session": "session 1", "ended": True, "store": False}},
    )
    engine.drain()
    assert [left_of(engine, n) for n in (1, 2, 3)] == [{0}, {-3}, {0}]
    residency = engine.ours.store.residency
    orders = [residency.dram.clean, residency.dram.dirty]
    slots = [order.victim(residency.now, lambda slot: True) for order in orders]
    first = {int(residency.dram.owned[slot].run.priority) for slot in slots if slot is not None}
    assert -3 in first


@pytest.mark.parametrize("value", [7, b"\xff", ["a"], "x" * 100_000, "\ud800"], ids=type)
def test_an_id_of_any_kind_does_no_harm(engine: ScriptedEngine, value: Any) -> None:
    request = engine.make_request("a", PROMPT, 4, params={"attnstore": {"parent": value}})
    request.session_id, request.kv_hints = value, value
    engine.scheduler.add_request(request)
    engine.drain()
    assert engine.ours.store.figures().counts["saved"] == 4
