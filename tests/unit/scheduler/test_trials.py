# SPDX-License-Identifier: Apache-2.0
"""No way to a load passes the trial of what a tier brings up, and no crowd shortens it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.index.chunk import State
from attnstore_vllm.store import trial
from attnstore_vllm.store.trial import PUT_OFF_MAX, TRIED_CHUNKS
from attnstore_vllm.types import NVME, Cause
from tests.helpers import names_of, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK
from tests.unit.scheduler.test_audits import (
    BITS,
    LENGTH,
    AuditWorld,
    Start,
    computed,
    nvme_alone,
    opened,
)
from tests.unit.scheduler.test_takes import section, taken
from tests.vllm_objects import output


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    yield from opened(partial(AuditWorld, monkeypatch, tmp_path))


def test_a_burst_behind_one_system_prompt_ends_no_trial(start: Start) -> None:
    """It compares the chunk that all share, and not the one of the conversation that is wrong."""
    world = start(rate=1e-9, slots=64)
    tokens = tokens_of(1, LENGTH)
    nvme_alone(world, tokens, wrong=3)
    first = world.asks(tokens, "first")
    others = [tokens[:CHUNK] + tokens_of(10 + number, 2 * CHUNK) for number in range(TRIED_CHUNKS)]
    crowd = [world.asks(other, f"other {number}") for number, other in enumerate(others)]
    for request in crowd:
        world.end_step(request)
        world.finish(request)
    world.end_step()
    world.rig.until_idle()
    world.report(world.side.build_step(output({"first": (0, CHUNK)}, {})))
    first.num_computed_tokens = CHUNK
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": TRIED_CHUNKS, "not_compared": 1}
    audit = world.store.audit
    assert audit is not None and audit.trial.is_open(NVME)
    last = world.asks(tokens, "last")
    assert last.found == 0, "what it would load was not compared"
    for request in (first, last):
        world.end_step(request)
        world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes()["differed"] == 1
    for name in names_of(sequence_of(tokens)):
        chunk = world.store.residency.index.get(name.key)
        if chunk is not None:
            assert bytes(world.rig.pool.slot(chunk.dram.slot)) == computed(name)


def test_a_piece_that_has_no_whole_block_is_not_waited_for(start: Start) -> None:
    """No copy has some of it: the same prompt would be on trial again and again."""
    world = start(rate=1e-9, slots=16, store={"grain": BLOCK // 2})
    tokens = tokens_of(1, CHUNK + BLOCK // 2)
    nvme_alone(world, tokens)
    longer = [*tokens, *tokens_of(2, BLOCK)]
    assert world.serves(longer, "one") == 0
    assert world.outcomes() == {"agreed": 1}
    assert world.serves(longer, "two") == len(tokens)


def test_where_few_are_compared_at_once_others_are_the_next_time(start: Start) -> None:
    """Two copies fit in this DRAM, and each hit has four chunks."""
    world = start(rate=1e-9, slots=16)
    tokens = tokens_of(1, LENGTH)
    nvme_alone(world, tokens)
    assert world.serves(tokens, "one") == 0
    assert world.outcomes() == {"agreed": 2, "not_compared": 2}
    assert world.serves(tokens, "two") == 0
    assert world.outcomes() == {"agreed": 4, "not_compared": 4}
    assert world.serves(tokens, "three") == LENGTH - 1


def test_who_asks_before_all_others_ends_the_trial_for_them(start: Start) -> None:
    """As `attnstore audit` does before a server gets requests."""
    world = start(rate=1e-9, slots=64)
    tokens, others = tokens_of(1, LENGTH), tokens_of(5, LENGTH)
    nvme_alone(world, tokens)
    nvme_alone(world, others)
    asked: dict[str, Any] = {"kv_transfer_params": {"attnstore": {"audit": True}}}
    assert world.serves(tokens, "asked", **asked) == 0
    assert world.outcomes() == {"agreed": TRIED_CHUNKS}
    assert world.serves(others, "another") == LENGTH - 1


def test_a_burst_does_not_end_a_trial_before_it_is_held(start: Start) -> None:
    """All of it has come before the first one is computed."""
    world = start(rate=1e-9, slots=64)
    tokens = tokens_of(1, LENGTH)
    nvme_alone(world, tokens, wrong=3)
    crowd = [world.asks(tokens, f"r{number}") for number in range(PUT_OFF_MAX + 1)]
    assert [request.found for request in crowd] == len(crowd) * [0]
    for request in crowd:
        world.end_step(request)
        world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes()["differed"] == 1
    assert world.side.take_stats().data["counters"].get("recomputations:audit") == len(crowd)


def test_after_an_alarm_a_trial_has_its_limit_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed behind vLLM's cache then is neither saved nor compared: where all prompts
    begin alike the tier would never be served."""
    monkeypatch.setattr(trial, "PUT_OFF_S", 0.0)
    world = start(rate=1e-9, slots=64)
    tokens, wrong = tokens_of(1, LENGTH), tokens_of(5, LENGTH)
    nvme_alone(world, tokens)
    world.put(wrong, wrong=3)
    asked: dict[str, Any] = {"kv_transfer_params": {"attnstore": {"audit": True}}}
    assert world.serves(wrong, "drawn", **asked) == 0
    assert world.outcomes() == {"agreed": 3, "differed": 1}
    found = [world.serves(tokens, f"r{number}", CHUNK) for number in range(PUT_OFF_MAX + 1)]
    assert found == PUT_OFF_MAX * [0] + [LENGTH - 1 - CHUNK]


@pytest.mark.parametrize("is_late", [True, False])
def test_what_is_taken_otherwise_than_it_was_offered_may_be_on_trial_by_then(
    start: Start, is_late: bool
) -> None:
    """vLLM 0.33 may take an offer in a later step, when nothing is held any more; and of several
    groups it may take a part, which another window backs. What was computed here may have left
    DRAM since, and come up from what others wrote."""
    options = {"windows": True, "cuts_hits": True, "compute_if_sooner": False}
    world = start(rate=1e-9, store={"comparisons": (BITS, BITS)}, **options)
    tokens = tokens_of(1, LENGTH)
    world.serve(world.request("before", tokens))
    world.rig.until_idle()
    has_failed = []
    for tier in ("", NVME):
        request = world.request("again", tokens)
        world.come(request)
        found = world.answer(request)
        assert found == LENGTH - 1
        if is_late:
            world.end_step()
        section(world, 3 if is_late else 1).brought_by = tier
        has_failed.append(taken(world, request, found if is_late else 2 * CHUNK).has_failed)
        world.finish(request)
        world.end_step()
    assert has_failed == [False, True]
    assert world.store.residency.num_held() == 0


NUM_SLOTS, NUM_CHUNKS, LATER = 16, 24, 20


@pytest.mark.parametrize("tier", ["", NVME])
def test_a_part_that_has_come_up_on_trial_is_lost(start: Start, tier: str) -> None:
    """Of a load that is longer than DRAM, later parts come up when it has begun. What NVMe has of a
    chunk may be others' by then, though the hit was let pass with the bytes that DRAM had."""
    world = start(rate=1e-9, slots=NUM_SLOTS)
    tokens = tokens_of(1, NUM_CHUNKS * CHUNK + 1)
    names = names_of(sequence_of(tokens))
    for name in names:
        assert world.rig.put(name, computed(name)) is not None
        world.rig.until_idle()
    request = world.request("one", tokens)
    world.come(request)
    found = world.answer(request)
    assert found == NUM_CHUNKS * CHUNK
    chunk = world.rig.chunk(names[LATER])
    world.start(request, found)
    assert chunk.dram.state is State.ABSENT
    world.store.residency.nvme.is_found[chunk.at(NVME).slot] = bool(tier)
    loaded, missing = 0, set()
    deadline = time.monotonic() + 10.0
    while world.side.any_open():
        assert time.monotonic() < deadline
        plan = world.side.build_step(output({}, {}))
        for load in plan.loads:
            loaded += load.num_blocks
            missing |= set(load.missing)
        world.report(plan)
        time.sleep(0.001)
    state = world.side.requests["one"]
    num_good = LATER if tier else NUM_CHUNKS
    assert loaded == num_good * CHUNK // BLOCK
    assert missing == {*range(1 + loaded, 1 + NUM_CHUNKS * CHUNK // BLOCK)}
    assert state.counted.why_computed is (Cause.LOST if tier else None)
    request.num_computed_tokens = num_good * CHUNK
    world.end_step(request)
    world.finish(request)
    world.end_step()
    assert world.store.residency.num_held() == 0
