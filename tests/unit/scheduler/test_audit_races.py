# SPDX-License-Identifier: Apache-2.0
"""The store's thread removes KV, or ends a trial, while the scheduler's thread is about to serve or
save it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.index.sections import Reach
from attnstore_vllm.store import trial
from attnstore_vllm.types import NVME
from tests import step_world
from tests.helpers import names_of, sequence_of, tokens_of
from tests.step_world import CHUNK
from tests.unit.scheduler.test_audits import (
    BEHIND,
    BITS,
    LENGTH,
    AuditWorld,
    Start,
    computed,
    goes_on,
    nvme_alone,
    opened,
    removes,
    saved_behind,
)
from tests.vllm_objects import output

ASKED: Any = {"kv_transfer_params": {"attnstore": {"audit": True}}}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    yield from opened(partial(AuditWorld, monkeypatch, tmp_path))


def audit_of(world: AuditWorld) -> Any:
    assert world.store.audit is not None
    return world.store.audit


def after(
    monkeypatch: pytest.MonkeyPatch, what: Any, name: str, then: Callable[[], object]
) -> None:
    """When this has returned something for the first time, the store's thread has a moment."""
    real, pending = getattr(what, name), [then]

    def call(*args: Any, **given: Any) -> Any:
        found = real(*args, **given)
        if found and pending:
            pending.pop()()
        return found

    monkeypatch.setattr(what, name, call)


# ---- a tier's trial fails --------------------------------------------------------------


def test_a_tier_that_fails_while_its_kv_is_held_is_not_served(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(rate=1e-9, slots=64)
    tokens = tokens_of(1, LENGTH)
    nvme_alone(world, tokens, wrong=1)
    after(monkeypatch, world.store, "hold_ready", partial(audit_of(world).fail, NVME))
    assert world.serves(tokens, "one") == 0
    assert world.serves(tokens, "two") == LENGTH - 1, "what was computed since"
    for name in names_of(sequence_of(tokens))[:4]:
        chunk = world.rig.chunk(name)
        assert bytes(world.rig.pool.slot(chunk.dram.slot)) == computed(name)


def test_an_answer_is_not_given_again_of_a_tier_that_fails_meanwhile(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was computed here when it was first offered, and has come up since."""
    world = start(rate=1e-9)
    tokens = tokens_of(1, LENGTH)
    names = world.put(tokens)
    request = world.request("one", tokens)
    world.come(request)
    assert world.answer(request) == LENGTH - 1
    world.end_step()

    def fail() -> None:
        world.rig.chunk(names[2]).brought_by = NVME
        audit_of(world).fail(NVME)

    after(monkeypatch, world.store, "hold_again", fail)
    assert world.answer(request) == 0
    world.finish(request)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_trial_that_fails_when_one_group_was_served_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_local: bool
) -> None:
    """Llama 4's local groups: a hit that ends with their chunk needs nothing of them, so the tier
    is on trial for long, and served. Requests that had loaded of it went on saving."""
    kinds = SimpleNamespace(WINDOW=Reach.LOCAL, STATE=Reach.STATE)
    monkeypatch.setattr(step_world, "Reach", kinds)
    more: Any = {"windows": True, "store": {"comparisons": (BITS, BITS)}} if is_local else {}
    more |= {"compute_if_sooner": False, "rate": 1e-9, "slots": 64}
    with contextmanager(opened)(partial(AuditWorld, monkeypatch, tmp_path)) as begin:
        world = begin(**more)
        right, wrong = tokens_of(1, LENGTH), tokens_of(2, LENGTH)
        nvme_alone(world, right)
        nvme_alone(world, wrong, wrong=3)
        assert world.serves(right, "one") == 0
        assert audit_of(world).trial.is_open(NVME) is is_local
        fail, had_heard = audit_of(world).fail, list[bool]()

        def heard_before(tier: str) -> None:
            """Of the chunk that differs: others of the tier are dropped after that."""
            had_heard.append(audit_of(world).take_removed())
            fail(tier)

        monkeypatch.setattr(audit_of(world), "fail", heard_before)
        loads = world.asks([*wrong[:-1], *tokens_of(9, BEHIND + 1)], "loads")
        assert loads.found == LENGTH - 1
        drawn = world.asks(wrong, "drawn", **ASKED)
        for request in (drawn, loads):
            world.end_step(request)
            world.finish(request)
            world.end_step()
            world.rig.until_idle()
        assert world.outcomes()["differed"] == 1
        names = names_of(sequence_of(loads.all_token_ids))
        kept = [world.store.residency.index.get(name.key) is not None for name in names]
        assert not any(kept[3:6]), "saved of what had loaded wrong KV"
        assert had_heard == [True] * is_local


def test_a_trial_that_nothing_was_served_of_ends_no_saves(start: Start) -> None:
    """vLLM's cache has nothing of it: conversations go on as before."""
    world = start(rate=1e-9, slots=64)
    tokens = tokens_of(1, LENGTH)
    nvme_alone(world, tokens, wrong=3)
    assert world.serves(tokens, "one") == 0
    assert world.outcomes()["differed"] == 1
    behind = [*tokens, *range(9000, 9000 + BEHIND)]
    world.serves(behind, "finds the beginning in HBM", LENGTH - 1)
    assert saved_behind(world, tokens)


# ---- a chunk is removed ----------------------------------------------------------------


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize("when", ["in a step", "as it ends"])
def test_what_is_removed_between_a_look_and_the_saves_is_not_saved_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, when: str, is_removed: bool, windows: bool
) -> None:
    """Its bytes are in a request's blocks, which takes it for pushed out of DRAM."""
    more: Any = {"store": {"comparisons": (BITS, BITS)}, "windows": True} if windows else {}
    world = start(rate=1e-9, compute_if_sooner=False, slots=64, **more)
    tokens = tokens_of(1, LENGTH)
    if windows:
        world.serve(world.request("before", tokens))
        world.rig.until_idle()
    else:
        world.put(tokens)
    request = goes_on(world, tokens)
    assert request.found == LENGTH - 1
    fresh = world.asks(tokens_of(7, 2 * CHUNK + 1), "fresh")
    place = "_on_inputs" if when == "in a step" else "_leave"
    real = getattr(world.side, place)

    def removed_before(*given: Any) -> Any:
        if is_removed:
            removes(world, tokens, 3)
        return real(*given)

    if when != "in a step":
        world.end_step()
    monkeypatch.setattr(world.side, place, removed_before)
    if when == "in a step":
        lengths = {one.request_id: (one.found, one.num_tokens - one.found) for one in (request,)}
        plan = world.side.build_step(output(lengths | {"fresh": (0, 2 * CHUNK)}, {}))
        assert bool(plan.saves) is not is_removed
        world.report(plan)
    request.num_computed_tokens = request.num_tokens
    world.side.requests["goes on"].computing.scheduled_stop = request.num_tokens
    world.finish(request)
    monkeypatch.setattr(world.side, place, real)
    world.end_step()
    removed = world.store.residency.index.get(names_of(sequence_of(tokens))[3].key)
    assert (removed is None) is is_removed
    assert saved_behind(world, tokens) is not is_removed
    fresh.num_computed_tokens = CHUNK
    world.report(world.side.build_step(output({}, {"fresh": (CHUNK, CHUNK)})))
    first = names_of(sequence_of(fresh.all_token_ids))[0]
    assert world.store.residency.index.get(first.key) or windows, "who has loaded none goes on"
    fresh.num_computed_tokens = 2 * CHUNK
    world.finish(fresh)
    world.end_step()
    world.rig.until_idle()


def test_who_has_loaded_nothing_saves_in_the_next_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not as if there had been no room, which would be waited for."""
    world = start(rate=1e-9, slots=64)
    wrong, tokens = tokens_of(1, LENGTH), tokens_of(2, 2 * CHUNK + 1)
    world.put(wrong)
    request = world.asks(tokens)
    audit = audit_of(world)
    take_removed = audit.take_removed

    def removed_after() -> bool:
        had_removed = take_removed()
        removes(world, wrong, 3)
        return bool(had_removed)

    monkeypatch.setattr(audit, "take_removed", removed_after)
    plan = world.side.build_step(output({"one": (0, CHUNK)}, {}))
    monkeypatch.setattr(audit, "take_removed", take_removed)
    assert not plan.saves
    world.report(plan)
    request.num_computed_tokens = CHUNK
    plan = world.side.build_step(output({}, {"one": (CHUNK, 1)}))
    assert len(plan.saves) == 1
    world.report(plan)
    world.finish(request)
    world.end_step()


# ---- places for copies -----------------------------------------------------------------


@pytest.mark.parametrize("num_asked", [0, 2])
def test_hits_that_clients_ask_for_take_no_place_from_a_trial(
    start: Start, monkeypatch: pytest.MonkeyPatch, num_asked: int
) -> None:
    """They come first in each step: the tier's trial would end with nothing compared."""
    monkeypatch.setattr(trial, "PUT_OFF_S", 0.0)
    world = start(rate=1e-9, slots=16)  # room for two copies
    tokens, others = tokens_of(1, LENGTH), tokens_of(3, 2 * CHUNK + 1)
    nvme_alone(world, tokens, wrong=3)
    world.put(others)
    for number in range(trial.PUT_OFF_MAX + 2):
        asked = [world.asks(others, f"{number}, {n}", **ASKED) for n in range(num_asked)]
        request = world.asks(tokens, f"{number}")
        assert request.found == 0
        world.end_step(*asked, request)
        world.finish(*asked, request)
        world.end_step()
        world.rig.until_idle()
        if not audit_of(world).trial.is_open(NVME):
            break
    assert world.outcomes()["differed"] == 1


def test_what_a_client_asks_for_has_half_of_the_places(start: Start) -> None:
    world = start(rate=1e-9, slots=64)  # room for eight copies
    tokens = tokens_of(1, 6 * CHUNK + 1)
    world.put(tokens)
    assert world.serves(tokens, **ASKED) == 0
    assert world.outcomes() == {"agreed": 4, "not_compared": 2}


# ---- the audit stops the serving -------------------------------------------------------


def test_a_hit_that_is_held_when_the_audit_stops_is_not_offered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(rate=1e-9)
    tokens = tokens_of(1, LENGTH)
    world.put(tokens)
    after(monkeypatch, world.store, "hold_ready", partial(stop, world))
    assert world.serves(tokens) == 0


def stop(world: AuditWorld) -> None:
    """The mark is being written: nothing was dropped yet."""
    audit_of(world).is_stopped = True


@pytest.mark.parametrize("stops", [True, False])
def test_a_load_in_parts_ends_when_the_audit_stops(start: Start, stops: bool) -> None:
    world = start(rate=1e-9, slots=16)
    tokens = tokens_of(1, 24 * CHUNK + 1)
    for name in names_of(sequence_of(tokens)):
        assert world.rig.put(name, computed(name)) is not None
        world.rig.until_idle()
    request = world.request("one", tokens)
    world.come(request)
    found = world.answer(request)
    assert found == 24 * CHUNK
    world.start(request, found)
    world.report(world.side.build_step(output({}, {})))
    if stops:
        stop(world)
    num_blocks, missing = 0, set[int]()
    deadline = time.monotonic() + 10.0
    while world.side.any_open():
        assert time.monotonic() < deadline
        plan = world.side.build_step(output({}, {}))
        for load in plan.loads:
            num_blocks += load.num_blocks
            missing |= set(load.missing)
        world.report(plan)
        time.sleep(0.001)
    assert bool(missing) is stops
    assert (num_blocks == 0) is stops
    world.finish(request)
    world.end_step()
