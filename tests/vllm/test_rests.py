# SPDX-License-Identifier: Apache-2.0
"""Rests of finished requests (scheduler/rests.py), which are read from blocks that are free.

Goal: whatever becomes of the blocks, what is stored of a rest is the KV of its tokens.
Method: that of test_async_scheduling.py, with prompts that are larger than DRAM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.scripted import CHUNK, Limits, ScriptedEngine
from tests.vllm.scripted_worker import VOCAB
from tests.vllm.test_async_scheduling import check_stored, wait_until_quiet

DRAM_CHUNKS = 4


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(depth: int, model: Path, tmp_path: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(
        model, tmp_path / "store", num_blocks=70, depth=depth, seed=depth,
        limits=Limits(dram_slots=DRAM_CHUNKS),
    )  # fmt: skip
    yield engine
    engine.close()


def tokens(random: Random, length: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_is_saved_of_rests_is_right(engine: ScriptedEngine, seed: int) -> None:
    random = Random(seed)
    for number in range(30):
        old = random.choice(engine.worker.sequences) if engine.worker.sequences else []
        prompt = old[: random.randrange(250)] + tokens(random, random.randrange(1, 220))
        engine.add(str(number), prompt, random.randrange(1, 12))
        for _ in range(random.randrange(8)):
            engine.step()
        if random.random() < 0.2:
            engine.abort(str(number))
        if random.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
    engine.drain()
    wait_until_quiet(engine.ours)
    assert check_stored(engine)


@pytest.mark.parametrize("depth", [1])  # with steps in flight vLLM takes one for the other
def test_another_request_of_the_name_of_one_with_a_rest(engine: ScriptedEngine) -> None:
    """What the new one computes in this step is not read before it."""
    random, num_rests = Random(0), 0
    for _ in range(12):
        engine.add("a", tokens(random, 14 * CHUNK), 1)
        while "a" in engine.scheduler.requests:
            engine.step()
        num_rests += len(engine.ours.rests)
        engine.step()
    engine.drain()
    wait_until_quiet(engine.ours)
    assert num_rests, "nothing was left when a request ended"
    assert check_stored(engine)
