# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling, which the CPU build forces off: vLLM's AsyncScheduler, driven.

Goal: whatever comes together (aborts, preemptions, drafts that are rejected, steps in flight),
no forward pass attends to KV that is not that of its tokens, only confirmed tokens' KV is
stored, and nothing stays held.
Method: random arrivals and aborts from a seed over a scripted worker that knows the right bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys, chunk_key, encode_tokens, root_key
from attnstore_vllm.scheduler.scheduler import Scheduler as OurScheduler
from attnstore_vllm.types import Key
from tests.vllm.scripted import CHUNK, Limits, ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, TOKEN_KV, VOCAB, extend_kv, in_layer


@dataclass(frozen=True)
class Case:
    name: str
    depth: int
    drafts: int = 0
    policy: str = "fcfs"
    num_blocks: int = 200
    dram_slots: int = 64


CASES = [
    Case("steps in flight", depth=2),
    Case("three steps in flight", depth=3),
    Case("preemption", depth=2, num_blocks=40),
    Case("drafts", depth=1, drafts=3),
    Case("drafts in flight", depth=2, drafts=3),
    Case("drafts, preemption", depth=2, drafts=2, num_blocks=44),
    Case("priorities", depth=2, policy="priority", num_blocks=44),
    Case("little DRAM", depth=2, dram_slots=6),
    Case("synchronous", depth=1, num_blocks=44),
]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(case: Case, seed: int, model: Path, tmp_path: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(
        model, tmp_path / "store", num_blocks=case.num_blocks, depth=case.depth, seed=seed,
        drafts=case.drafts, policy=case.policy,
        limits=Limits(dram_slots=case.dram_slots),
    )  # fmt: skip
    yield engine
    engine.close()


def drive(engine: ScriptedEngine, seed: int, num_requests: int = 40) -> None:
    """Requests that share prefixes or continue earlier ones come, and some are aborted."""
    random = Random(seed)
    prefixes = [[random.randrange(VOCAB) for _ in range(120)] for _ in range(3)]
    alive: list[str] = []
    for number in range(num_requests):
        history = random.choice([*prefixes, *engine.worker.sequences])[: random.randrange(20, 250)]
        prompt = [*history, *(random.randrange(VOCAB) for _ in range(random.randrange(1, 60)))]
        engine.add(str(number), prompt, random.randrange(1, 60), random.randrange(3))
        alive.append(str(number))
        if random.random() < 0.1:
            engine.abort(alive.pop())  # while it waits
        for _ in range(random.randrange(12)):
            engine.step()
        if alive and random.random() < 0.3:
            engine.abort(alive.pop(random.randrange(len(alive))))
        if number % 7 == 6:
            engine.drain()
            wait_until_quiet(engine.ours)  # what was saved is on NVMe, however slow the disk is
            assert engine.scheduler.reset_prefix_cache()  # so that hits come from the store
    engine.drain()


def wait_until_quiet(ours: OurScheduler) -> None:
    deadline = time.monotonic() + 20
    while not ours.store.is_idle():
        assert time.monotonic() < deadline, "the store does not come to rest"
        ours.store.wait_for_any((), 0.01)
    ours.check_quiet()


def check_stored(engine: ScriptedEngine) -> int:
    """Every chunk in DRAM has exactly the KV of tokens that some request really had."""
    known: dict[bytes, list[int]] = {}
    parents: dict[Key, bytes] = {}
    namespace = engine.ours.names.namespace
    assert namespace is not None
    root = root_key(namespace, None, b"")
    for tokens in engine.worker.sequences:
        for stop in range(1, len(tokens) + 1):
            known[encode_tokens(tokens[:stop])] = tokens[:stop]
        keys = SequenceKeys(root, tokens, CHUNK)
        for number in range(len(tokens) // CHUNK + 1):
            parents[keys.parent(number)] = encode_tokens(tokens[: number * CHUNK])
    checked = 0
    for chunk in engine.ours.store.residency.index:
        assert chunk.name.parent in parents, "KV after tokens that no request had is stored"
        name = chunk.name
        if not name.tokens:  # on NVMe only: its key tells
            stop = name.position + name.num_tokens
            runs = {
                encode_tokens(tokens[name.position : stop]) for tokens in engine.worker.sequences
            }
            keys_of_runs = {chunk_key(name.parent, name.extra, run) for run in runs}
            assert name.key in keys_of_runs, "KV of tokens that no request had is stored"
            continue
        prefix = parents[name.parent] + name.tokens
        assert prefix in known, "KV of tokens that no request had is stored"
        if chunk.dram.state is not State.READY:
            continue
        kv: list[bytes] = []
        extend_kv(kv, known[prefix])
        slot = np.frombuffer(engine.pool.slot(chunk.dram.slot), dtype=np.uint8)
        layer_bytes, num_bytes = CHUNK * TOKEN_KV, chunk.name.num_tokens * TOKEN_KV
        for worker in engine.workers:
            geometry, rank = worker.side.geometry, worker.side.rank
            for layer in range(geometry.num_layers):
                wanted = in_layer(kv[chunk.name.position :], worker.first_layer + layer).tobytes()
                at = geometry.part_at(rank) + layer * layer_bytes
                assert slot[at:][:num_bytes].tobytes() == wanted
        checked += 1
    return checked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_right_kv_is_used_and_stored(case: Case, seed: int, engine: ScriptedEngine) -> None:
    drive(engine, seed)
    wait_until_quiet(engine.ours)
    assert check_stored(engine) >= min(5, case.dram_slots // 3)
    # How much is loaded depends on the disk's speed beside steps that take no time at all.
    assert engine.worker.loaded_tokens > BLOCK, "the store was hardly used"
    assert not case.drafts or engine.worker.rejected_tokens > 50


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("case", CASES[1:2], ids=lambda case: case.name)
def test_a_slot_that_is_wrong_is_noticed(case: Case, seed: int, engine: ScriptedEngine) -> None:
    """The checks of this file see what they are for: a chunk's slot holds other bytes."""
    engine.add("a", list(range(40)) * 5, 8)
    engine.drain()
    wait_until_quiet(engine.ours)
    chunk = next(c for c in engine.ours.store.residency.index if c.name.position == 32)
    engine.pool.slot(chunk.dram.slot)[5 * TOKEN_KV] ^= 1
    with pytest.raises(AssertionError):
        check_stored(engine)
    engine.scheduler.reset_prefix_cache()
    engine.add("b", list(range(40)) * 5, 8)
    with pytest.raises(AssertionError, match="wrong KV at position 37"):
        engine.drain()
