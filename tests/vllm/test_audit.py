# SPDX-License-Identifier: Apache-2.0
"""Hits of a real engine that are computed to be compared: faults in stored KV are found, and what
the CPU build computes in other batches and splits is no fault."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from attnstore_lab.testing.tiny_model import GQA
from attnstore_vllm.index.chunk import State
from attnstore_vllm.policy.kv_compare import BOUND
from tests.vllm.audit_soak import EVERY_HIT, OUTCOMES, Recording
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import chunks, events

PROMPT = 700


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(
        shape=GQA, dram="64MiB", settings={"audit": EVERY_HIT},
        vllm={"max_num_batched_tokens": 512},
    )  # fmt: skip


def asks_again(engine: Engine, prompt: list[int]) -> tuple[int, dict[str, int]]:
    """With HBM emptied: the tokens that it was spared, and what was found since."""
    engine.forget_hbm()
    before = events(engine, *OUTCOMES)
    answer = engine.ask(prompt)
    engine.settle()
    found = {name: n - before[name] for name, n in events(engine, *OUTCOMES).items()}
    return answer.cached_tokens, {name: n for name, n in found.items() if n}


def agree(engine: Engine) -> tuple[int, dict[str, int]]:
    prompt = random_tokens("agree", PROMPT)
    engine.ask(prompt)
    engine.settle()
    return asks_again(engine, prompt)


def test_a_hit_is_computed_and_agrees(engine: EngineHost) -> None:
    assert engine.call(agree) == (0, {"agreed": 3})


def rounds(engine: Engine) -> tuple[dict[str, int], float, int]:
    """Prompts that were computed in crowds and beside decoding, each computed again alone, or in
    another crowd. The largest distance, and how many were not 0."""
    audit: Any = engine.store.audit
    plain, chance = audit.comparisons[0], Random(1)
    recording = audit.comparisons[0] = Recording(plain)
    before = events(engine, *OUTCOMES)
    for round_ in range(6):
        prompts = [
            random_tokens(("rounds", round_, i), chance.randrange(300, 1500)) for i in range(5)
        ]
        for _ in range(2):
            engine.forget_hbm()
            numbers = [engine.submit(p, max_tokens=chance.choice((1, 20))) for p in prompts]
            engine.finish(*numbers)
            engine.settle()
            chance.shuffle(prompts)
            prompts = prompts if chance.random() < 0.5 else prompts[:2]
    audit.comparisons[0] = plain
    found = {name: n - before[name] for name, n in events(engine, *OUTCOMES).items()}
    return found, max(recording.seen, default=0.0), len(recording.seen)


@pytest.mark.long
def test_rounding_is_no_fault(engine: EngineHost) -> None:
    found, largest, _ = engine.call(rounds)
    assert found["differed"] == 0 and found["agreed"] > 50
    assert largest < BOUND / 5


def plants(engine: Engine) -> dict[str, dict[str, int]]:
    """Faults in the stored bytes of the second chunk of a prompt, and what each came to."""
    audit: Any = engine.store.audit
    comparison, pool = audit.comparisons[0], audit.context.pool
    units, (keys, values) = comparison.units, (side.places for side in comparison.sides)
    other = random_tokens("another tenant", PROMPT)
    engine.ask(other, salt="other")

    def slot_at(prompt: list[int], salt: str | None) -> Any:
        engine.ask(prompt, salt=salt)
        engine.settle()
        (chunk,) = [
            chunk
            for chunk in chunks(engine)
            if chunk.name.position == 256 and chunk.name.tokens[:4] == first(prompt)
        ]
        assert chunk.dram.state is State.READY
        return np.frombuffer(pool.slot(chunk.dram.slot), np.uint8)

    def first(prompt: list[int]) -> bytes:
        return prompt[256].to_bytes(4, "big")

    theirs = slot_at(other, "other").copy()

    def pages(slot: Any) -> Iterator[Any]:
        blocks = 256 // engine.side.geometry.block_tokens
        for unit in units:
            part = slot[unit.at : unit.at + blocks * unit.page_bytes]
            yield part.view(np.uint16).reshape(blocks, -1)

    def swap(slot: Any) -> None:
        for page in pages(slot):
            key, value = (page[:, places].copy() for places in (keys, values))
            page[:, keys], page[:, values] = value, key

    def shift(slot: Any) -> None:
        for page in pages(slot):
            page[:] = np.roll(page, 1, axis=0)

    def take(slot: Any) -> None:
        slot[:] = theirs

    def turn(slot: Any) -> None:
        """As a rotary table that begins elsewhere: each token's K is another's."""
        for page in pages(slot):
            page[:, keys] = np.roll(page[:, keys], 5, axis=1)

    found = {}
    for fault in (swap, shift, take, turn):
        prompt = random_tokens(("planted", fault.__name__), PROMPT)
        slot = slot_at(prompt, None)
        fault(slot)
        _, found[fault.__name__] = asks_again(engine, prompt)
    return found


def test_planted_faults_are_found(engine: EngineHost) -> None:
    found = engine.call(plants)
    assert found == {name: {"agreed": 2, "differed": 1} for name in found}
    assert list(found) == ["swap", "shift", "take", "turn"]
