# SPDX-License-Identifier: Apache-2.0
"""What sessions, tools and agents of clients make the scheduler's thread do in one step, counted
in operations, and what is kept of their names.
"""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.hints import ID_MAX
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.returns import NUM_KINDS, ReturnEstimator
from attnstore_vllm.policy.sessions import ENDED_MAX, SessionTable
from attnstore_vllm.policy.told import NOTHING, PLACES, ROWS, SEEN_MIN, Contexts, Told
from attnstore_vllm.policy.visits import Run, answer, unknown_run
from attnstore_vllm.scheduler import ended_sessions
from attnstore_vllm.scheduler import request as requests
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.shared.backend import BackendError
from attnstore_vllm.tiers.shared.redis_backend import RedisBackend
from tests.helpers import tokens_of
from tests.step_world import CHUNK, StepWorld
from tests.unit.scheduler.test_session_inputs import begin_so, saying
from tests.vllm_objects import output

ROOTS, CHILDREN, TURNS = 8, 32, 4


def last_requests(world: StepWorld, count: int) -> list[Any]:
    """The last requests of so many sessions, which are over then. Their answers are computed."""
    last = []
    for root in range(count):
        params = {"attnstore": {"session": str(root), "ended": True}}
        tokens = tokens_of(10_000 + root, CHUNK + 1)
        last.append(world.request(f"last {root}", tokens, kv_transfer_params=params))
    world.come(*last)
    for request in last:
        world.start(request, world.answer(request))
    world.end_step(*last)
    return last


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepWorld]:
    world = StepWorld(monkeypatch, records=4096, slots=2048)
    yield world
    world.close()


def test_sessions_that_end_in_one_step(world: StepWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may end ENDED_MAX runs. Many requests that end in one step end no more."""
    number = 0
    for root in range(ROOTS):
        for _ in range(TURNS):
            for child in range(CHILDREN):
                number += 1
                hints = {"session": f"{root} {child}", "parent": str(root)}
                tokens = tokens_of(number, CHUNK + 1)
                params = {"attnstore": hints}
                world.serve(world.request(f"{number}", tokens, kv_transfer_params=params))
    last = last_requests(world, ROOTS)
    ranked = Counter[str]()
    rank = Residency.rank

    def counted(residency: Residency, run: Run) -> None:
        ranked["runs"] += 1
        rank(residency, run)

    monkeypatch.setattr(Residency, "rank", counted)
    world.finish(*last)
    assert ranked["runs"] <= ENDED_MAX + 2 * ROOTS, "what is beyond is for a later step"
    left = ROOTS * (CHILDREN * TURNS + 1) - ranked["runs"]
    assert world.put_off("end") == left > 0
    for _ in range(ROOTS):
        ranked.clear()
        world.end_step()
        assert ranked["runs"] <= ENDED_MAX
        left -= ranked["runs"]
    assert left == 0, "in later steps all are ended"


def test_the_line_of_runs_that_wait_to_be_ended_has_an_end(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond leaves as any other."""
    monkeypatch.setattr(ended_sessions, "LINE_MAX", CHILDREN)
    for number in range(2 * TURNS * CHILDREN):
        hints = {"session": f"child {number % (2 * CHILDREN)}", "parent": f"{number % 2}"}
        tokens = tokens_of(number, CHUNK + 1)
        world.serve(world.request(f"{number}", tokens, kv_transfer_params={"attnstore": hints}))
    last = last_requests(world, 2)
    world.finish(*last)
    assert world.put_off("end_dropped") == 2 * (TURNS - 1) * CHILDREN


def test_hints_of_an_input_are_read_once(world: StepWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session decodes for many steps behind its input."""
    session = begin_so(world, tokens_of(1, CHUNK), None)
    reads = Counter[str]()
    read: Any = vars(requests)["read_params"]

    def counted(*args: Any) -> Any:
        reads["of hints"] += 1
        return read(*args)

    monkeypatch.setattr(requests, "read_params", counted)
    session.sampling_params = saying({"attnstore": {"ttl": 60}})
    session.arrival_time += 1.0
    for _ in range(10):
        session.all_token_ids.append(7)
        told = {"session": (session.num_tokens - 1, 1)}
        world.report(world.side.build_step(output({}, told)))
        session.num_computed_tokens = session.num_tokens
    assert 0 < reads["of hints"] <= 2


def test_contexts_that_are_given_up_leave_no_lanes() -> None:
    """docs/hints.md: the order of departure has ROWS more lanes by them, for each priority."""
    number = 6 * ROWS
    estimator = ReturnEstimator()
    tier = departures("attnstore", number, estimator)
    tool, uses = 0, 0
    for slot in range(number):
        told = Told(b"tenant", None, f"tool {tool}")
        kind = uses * 7 % NUM_KINDS // 4 * 4  # what is not answered yet
        now = 0.1 * slot
        run = Run(estimator.open(slot, kind, 1, 1.0, now), kind, now, False, told=told)
        tier.add(slot, run)
        answer(run, 10, estimator, now)
        tier.rank(run)
        uses += run.context != NOTHING
        if uses == 16:
            tool, uses = tool + 1, 0
    order: Any = tier._order
    of_rows = [lane for lane in order.places if lane.told != NOTHING]
    seen = estimator.told.seen()
    assert seen is not None
    names = seen.names.max() // ROWS
    assert names > ROWS, "rows were used again"
    assert 0 < len(of_rows) <= ROWS, f"{len(of_rows)} lanes of {names} names of rows"


def test_tenants_that_have_no_context_are_forgotten() -> None:
    contexts = Contexts()
    for tenant in range(20 * PLACES):
        for _ in range(SEEN_MIN + 60):
            contexts.number(Told(tenant.to_bytes(32, "big"), None, "bash"))
    assert len(contexts._tenants) <= PLACES


def test_what_a_store_says_forges_no_line_of_the_log() -> None:
    """Who stands in the network between may say anything, and needs no secret."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer_all() -> None:
        connection, _ = listening.accept()
        with connection:
            while connection.recv(1 << 16):
                connection.sendall(
                    b"-ERR no\nWARNING [attnstore_vllm] \x1b[8m" + b"x" * 9999 + b"\r\n"
                )

    thread = threading.Thread(target=answer_all, daemon=True)
    thread.start()
    url = f"redis://127.0.0.1:{listening.getsockname()[1]}"
    backend = RedisBackend({"url": url, "timeout_s": 2.0})
    with pytest.raises(BackendError) as told:
        backend.exist(["name"])
    backend.close()
    listening.close()
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 2048


def test_what_is_told_of_adapters_costs_a_look_at_those_who_have_one(world: StepWorld) -> None:
    """Each step with adapters has such a report, and clients say how many requests there are."""

    class Requests(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("all of them are looked at")

    plain = world.request("plain", tokens_of(1, CHUNK + 1))
    adapted = world.request("adapted", tokens_of(2, CHUNK + 1))
    world.come(plain)
    adapted.lora_request = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="a")
    world.side.adapters.enter(adapted)
    world.come(adapted)
    side = world.side
    state = side.requests["adapted"]
    state.computing.scheduled_stop, state.adapter = 1, b"of before"
    side.requests = Requests(side.requests)
    side.on_report(StepReport(1, Counter(), adapters={1: {0: b"now"}}))
    assert state.computing.is_outdated
    assert not side.requests["plain"].computing.is_outdated
    side.requests = dict(side.requests)


def test_long_ids_of_sessions_take_no_more_room_than_short_ones() -> None:
    """A client's id may have ID_MAX characters, of four bytes each, and each parent 32 of them."""

    def used(pad: str) -> int:
        table, run = SessionTable(), unknown_run(0.0)
        tracemalloc.start()
        for parent in range(20):
            for child in range(CHILDREN):
                table.note(bytes(32), f"{parent} {child} {pad}", run, f"{parent} {pad}")
        now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(table) == 20 * (CHILDREN + 1)
        return now

    assert used("\U0001f600" * (ID_MAX - 8)) < 1.1 * used("")
