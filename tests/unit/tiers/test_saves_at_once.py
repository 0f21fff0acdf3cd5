# SPDX-License-Identifier: Apache-2.0
"""Room for all that a request saves in a step is made at once: what leaves DRAM for it is what
would have left for one chunk after another, in the same order, and no more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import NUM_KINDS, ReturnEstimator
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.context import StoreClock
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import Event, Key
from tests.helpers import CHUNK_TOKENS, GRAIN, memory_rig, name_of, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld

SLOTS = 64
ROUNDS = 60
CLOCK_LOOKS = 6
"""Of a step, however much it saves."""
LONGEST = 24
"""Chunks: more than one decision is for (policy/eviction/rules.py: KEPT_PART)."""


class Logged(Residency):
    """Notes what leaves DRAM, in which order."""

    def __init__(self, policy: str) -> None:
        order = partial(departures, policy, estimator=ReturnEstimator())
        super().__init__(SLOTS, 2 * SLOTS, order, chunk_tokens=CHUNK_TOKENS, grain=GRAIN)
        self.nvme.open(0, 2 * SLOTS)
        self.left: list[Key] = []

    def leave_dram(self, *chunks: Chunk) -> None:
        self.left += [chunk.name.key for chunk in chunks]
        super().leave_dram(*chunks)

    def write(self, most: int) -> None:
        for _ in range(most):
            chunk = self.begin_store(self.nvme)
            if chunk is not None:
                self.finish_store(self.nvme, chunk, bytes(16))


def _save(tiers: Residency, number: int, length: int, run: Run, *, at_once: bool) -> int:
    """A prompt's chunks, until one finds no room. Returns how many are saved."""
    sequence = sequence_of(tokens_of(number, length * CHUNK_TOKENS))
    saved: list[Chunk] = []
    for place in range(length):
        more = length - place - 1 if at_once else 0
        chunk = tiers.begin_save(name_of(sequence, place), run, waits=True, num_more=more)
        if chunk is None:
            break
        saved.append(chunk)
    if at_once:
        tiers.finish_save(*saved)
    else:
        for chunk in saved:
            tiers.finish_save(chunk)
    return len(saved)


@pytest.mark.parametrize("policy", ["attnstore", "lru", "fifo"])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_leave_in_the_same_order(policy: str, seed: int) -> None:
    def played(*, at_once: bool) -> tuple[Sequence[int], Sequence[Key]]:
        random, tiers = Random(seed), Logged(policy)
        saved = []
        for number in range(ROUNDS):
            tiers.now += random.choice([0.01, 1.0, 60.0])
            kind, priority = random.randrange(NUM_KINDS), random.choice(list(Priority))
            run = Run(number, kind, tiers.now, False, priority)
            length = random.randint(1, LONGEST)
            saved.append(_save(tiers, number, length, run, at_once=at_once))
            tiers.write(random.choice([0, 0, 3, 30]))
            tiers.check_integrity()
        return saved, tiers.left

    one_by_one, at_once = played(at_once=False), played(at_once=True)
    assert at_once == one_by_one
    assert len(at_once[1]) > SLOTS


def test_no_more_leave_than_are_saved() -> None:
    """Others have saved the same prompt's end meanwhile."""
    rig = memory_rig(2 * SLOTS, SLOTS, threaded=False, clock=lambda: 100.0)
    names = [name_of(sequence_of(tokens_of(9, 16 * CHUNK_TOKENS)), place) for place in range(16)]
    for number in range(SLOTS - 12):
        assert rig.put(name_of(sequence_of(tokens_of(100 + number, CHUNK_TOKENS)), 0)) is not None
    for name in names[4:]:
        assert rig.put(name) is not None
    run = Run(1, 0, 200.0, False)
    given: dict[str, Any] = {"again_from": 0, "pin_s": None, "pin_stop": 0}
    begun = rig.store.begin_saves(names, [run] * 16, dram_only=False, yields=False, **given)
    assert [chunk is not None for chunk in begun] == [True] * 4 + [False] * 12
    assert rig.store.residency.counts[Event.EVICTED_DRAM] == 4
    assert rig.store.residency.dram.num_used == SLOTS
    rig.pool.close()


@pytest.mark.parametrize("length", [2, 16])
def test_a_request_asks_the_store_once(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """However many chunks a step saves of it, the clock is looked at as often."""
    world = StepWorld(monkeypatch, records=256, slots=256, step_budget=1 << 20, step_tokens=1 << 14)
    asked: list[float] = []
    real, ours = StoreClock.__call__, threading.get_ident()

    def counted(clock: StoreClock) -> float:
        now = real(clock)
        if threading.get_ident() == ours:
            asked.append(now)
        return now

    request = world.request("a", tokens_of(1, length * CHUNK + BLOCK), max_tokens=1)
    world.come(request)
    assert world.ask(request) == 0
    world.start(request, 0)
    with monkeypatch.context() as patched:
        patched.setattr(StoreClock, "__call__", counted)
        world.end_step(request)
    assert world.counts["saves"] == length
    assert 1 <= len(asked) <= CLOCK_LOOKS
    world.close()
