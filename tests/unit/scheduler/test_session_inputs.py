# SPDX-License-Identifier: Apache-2.0
"""What a streaming session's later input says holds for all that the session leaves from then on,
whichever save is the first to come behind it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.scheduler import saving
from tests.helpers import tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.vllm_objects import output

GREETING = 2 * CHUNK + 8
"""It ends within a chunk."""


def said(**hints: Any) -> Any:
    return saying({"attnstore": hints} if hints else None)


def saying(params: Any) -> Any:
    """An input whose kv_transfer_params are these."""
    extra = {"kv_transfer_params": params} if params else None
    return SimpleNamespace(prompt_logprobs=None, skip_reading_prefix_cache=False, extra_args=extra)


def say_more(world: StepWorld, session: Any, tokens: list[int], **hints: Any) -> None:
    """A later input comes, is computed in one step, and the session ends."""
    say(world, session, tokens, **hints)
    world.finish(session)
    world.end_step()


def say(world: StepWorld, session: Any, tokens: list[int], **hints: Any) -> None:
    """A later input comes, and is computed in one step."""
    say_so(world, session, tokens, said(**hints))


def say_so(world: StepWorld, session: Any, tokens: list[int], sampling: Any) -> None:
    before = session.num_tokens
    session.all_token_ids += tokens
    session.num_prompt_tokens = session.num_tokens
    session.arrival_time += 1.0
    session.sampling_params = sampling
    world.tables["session"] = list(range(1, 2 + session.num_tokens // BLOCK))
    told = {"session": (before, session.num_tokens - before)}
    world.report(world.side.build_step(output({}, told)))
    session.num_computed_tokens = session.num_tokens


def begin(world: StepWorld, tokens: list[int], **hints: Any) -> Any:
    return begin_so(world, tokens, {"attnstore": hints} if hints else None)


def begin_so(world: StepWorld, tokens: list[int], params: Any, **given: Any) -> Any:
    """As vLLM does it: the request has the first input's kv_transfer_params for good."""
    given |= {"sampling_params": saying(params), "kv_transfer_params": params}
    session = world.request("session", tokens, resumable=True, **given)
    world.come(session)
    world.start(session, world.answer(session))
    world.end_step(session)
    return session


@pytest.mark.parametrize("first", [{}, {"ttl": 600}])
@pytest.mark.parametrize("other_began_so", [False, True])
def test_a_shorter_ttl(
    first: dict[str, int], other_began_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the chunk in which the input begins, whose beginning another conversation has."""
    world = StepWorld(monkeypatch)
    greeting = tokens_of(1, GREETING)
    if other_began_so:
        world.serve(world.request("other", greeting + tokens_of(7, 2 * CHUNK)))
    session = begin(world, greeting, **first)
    say_more(world, session, tokens_of(2, 2 * CHUNK), ttl=5)
    found = []
    for chunk in world.store.residency.index:
        name = chunk.name
        is_mine = name.tokens == encode_tokens(session.all_token_ids[name.position : name.end])
        if is_mine and name.end > GREETING:
            lease = world.store.residency.run_of(chunk).lease
            found.append(None if lease is None else lease.ttl_s)
    world.close()
    assert found and set(found) == {5}


@pytest.mark.parametrize("kind", ["states", "windows", "plain"])
@pytest.mark.parametrize("count", [4, 8, 40])
def test_store_false(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step's end is saved first, and the input fills no chunk."""
    # Chunks have 16 tokens here, and 256 on a server: so what is 16 there is 4.
    monkeypatch.setattr(saving, "MIN_TAIL_TOKENS", 4)
    monkeypatch.setattr(saving, "GRAIN_TOKENS", 4)
    options: dict[str, Any] = {} if kind == "plain" else {kind: True}
    world = StepWorld(monkeypatch, **options)
    session = begin(world, tokens_of(1, 2 * CHUNK))
    before = session.num_tokens
    there = {chunk.name.key for chunk in world.store.residency.index}
    say_more(world, session, tokens_of(2, count), store=False)
    deadline = time.monotonic() + 5.0
    while not world.store.is_idle():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    new = [chunk.name for chunk in world.store.residency.index if chunk.name.key not in there]
    world.close()
    assert [name for name in new if name.end > before] == []


@pytest.mark.parametrize("kind", ["states", "windows", "plain"])
@pytest.mark.parametrize("count", [4, 2 * CHUNK])
@pytest.mark.parametrize("last", [4, 2 * CHUNK])
def test_an_input_that_another_follows(
    kind: str, count: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fills no chunk: vLLM keeps the last input's parameters alone."""
    monkeypatch.setattr(saving, "MIN_TAIL_TOKENS", 4)
    monkeypatch.setattr(saving, "GRAIN_TOKENS", 4)
    options: dict[str, Any] = {} if kind == "plain" else {kind: True}
    world = StepWorld(monkeypatch, **options)
    session = begin(world, tokens_of(1, GREETING))
    say(world, session, tokens_of(2, count), store=False)
    say_more(world, session, tokens_of(3, last))
    ends = [chunk.name.end for chunk in world.store.residency.index]
    world.close()
    assert max(ends) <= GREETING


@pytest.mark.parametrize("count", [4, 2 * CHUNK])
def test_a_ttl_that_another_input_follows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = StepWorld(monkeypatch)
    session = begin(world, tokens_of(1, GREETING))
    say(world, session, tokens_of(2, count), ttl=5)
    say_more(world, session, tokens_of(3, 2 * CHUNK))
    found = set()
    for chunk in world.store.residency.index:
        if chunk.name.end > GREETING:
            lease = world.store.residency.run_of(chunk).lease
            found.add(None if lease is None else lease.ttl_s)
    world.close()
    assert found == {5}


def envelope(**hints: Any) -> dict[str, Any]:
    ours = {"action_type": "attnstore.hints", "action_version": "1", "payload": hints}
    return {"kv_hint": {"actions": [ours]}}


@pytest.mark.parametrize(
    ("params", "leaves"),
    [
        (envelope(store=False), set()),
        (envelope(ttl=5), {5.0}),
        ({"agent_hint": {"cache_control": {"ttl": "5s"}}}, {5.0}),
    ],
    ids=["kv_hint's store", "kv_hint's ttl", "agent_hint's ttl"],
)
@pytest.mark.parametrize("last", [False, True])
def test_hints_of_other_standards(
    params: Any, leaves: set[float], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last input, and of one that another follows."""
    world = StepWorld(monkeypatch)
    session = begin(world, tokens_of(1, GREETING))
    say_so(world, session, tokens_of(2, 2 * CHUNK), saying(params))
    if not last:
        say(world, session, tokens_of(3, 2 * CHUNK))
    world.finish(session)
    world.end_step()
    residency = world.store.residency
    leases = [residency.run_of(one).lease for one in residency.index if one.name.end > GREETING]
    world.close()
    assert {lease and lease.ttl_s for lease in leases} == leaves


def test_the_first_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `kv_hints`, which come with it alone, hold before what its body says."""
    world = StepWorld(monkeypatch)
    params = envelope(ttl=5, store=False)
    given = {"kv_hints": envelope(ttl=600, store=True)["kv_hint"]}
    session = begin_so(world, tokens_of(1, GREETING), params, **given)
    say_more(world, session, tokens_of(2, 2 * CHUNK))
    residency = world.store.residency
    leases = [residency.run_of(one).lease for one in residency.index if one.name.position]
    world.close()
    assert {lease and lease.ttl_s for lease in leases} == {600.0}
