# SPDX-License-Identifier: Apache-2.0
"""Loads in parts (scheduler/stages.py): of prompts whose KV is longer than DRAM.

Goal: such a prompt that is asked again computes no more than what did not come, also where a fault
comes between two parts; and no forward pass attends to KV that is not that of its tokens.
Method: vLLM's scheduler over a scripted worker that knows the right bytes, and a real file.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index.chunk import State
from attnstore_vllm.preflight import SLAB_NAME
from tests.vllm.scripted import CHUNK, Limits, ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, VOCAB, extend_kv, in_layer
from tests.vllm.test_async_scheduling import check_stored, wait_until_quiet

DRAM_CHUNKS = 6
NUM_CHUNKS = 2 * DRAM_CHUNKS
PROMPT = NUM_CHUNKS * CHUNK + 9
Start = Callable[..., ScriptedEngine]
NAMES = itertools.count()


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    engines: list[ScriptedEngine] = []

    def begin(depth: int = 1, num_blocks: int = 90, **options: int) -> ScriptedEngine:
        engines.append(
            ScriptedEngine(
                model, tmp_path / f"store {len(engines)}", num_blocks=num_blocks, depth=depth,
                seed=depth, limits=Limits(dram_slots=DRAM_CHUNKS), load_deadline_ms=60_000,
                num_ranks=options.get("num_ranks", 1),
            )
        )  # fmt: skip
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def tokens(seed: int, length: int = PROMPT) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(length)]


def ask(engine: ScriptedEngine, name: str, prompt: list[int]) -> None:
    engine.add(name, prompt, 2)
    engine.drain()
    wait_until_quiet(engine.ours)


def store(engine: ScriptedEngine, prompt: list[int], others: int = 0) -> None:
    """Ask for the prompt until all of its chunks are stored: a busy disk may not take all of what
    one request leaves, and the rest is given up. HBM has nothing of it then.

    Args:
        others: prompts that are stored whole already.
    """
    for _ in range(5):
        ask(engine, f"store {next(NAMES)}", prompt)
        forget_hbm(engine)
        there = Counter(chunk.name.position for chunk in engine.ours.store.residency.index)
        if all(there[number * CHUNK] > others for number in range(NUM_CHUNKS)):
            loaded(engine)
            return
    raise AssertionError(f"not all was stored: {sorted(there.items())}")


def forget_hbm(engine: ScriptedEngine) -> None:
    assert engine.scheduler.reset_prefix_cache()


def to_a_later_part(engine: ScriptedEngine) -> None:
    """Until the first part of a load is over, and others are not planned."""
    for _ in range(2000):
        engine.step()
        load = engine.ours.stages.current
        if load is not None and not engine.ours.plans.is_open(load.plan_id):
            return
    raise AssertionError("no load in parts was begun")


def loaded(engine: ScriptedEngine) -> int:
    """Tokens that were loaded since the last call."""
    found, engine.worker.loaded_tokens = engine.worker.loaded_tokens, 0
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_of_twice_dram(start: Start, depth: int, num_ranks: int) -> None:
    engine, prompt = start(depth, num_ranks=num_ranks), tokens(0)
    store(engine, prompt)
    ask(engine, "again", prompt)
    assert loaded(engine) >= 0.9 * PROMPT
    assert check_stored(engine)
    # What was loaded is in vLLM's cache under the names of its tokens.
    ask(engine, "at once", prompt)
    assert loaded(engine) < CHUNK


def test_two_at_once(start: Start) -> None:
    """One is loaded in parts; the other is loaded as far as DRAM has room, and ends too."""
    engine, prompts = start(), [tokens(0), tokens(1)]
    for others, prompt in enumerate(prompts):
        store(engine, prompt, others)
    for name, prompt in enumerate(prompts):
        engine.add(f"again {name}", prompt, 2)
    engine.drain()
    wait_until_quiet(engine.ours)
    assert loaded(engine) >= 0.9 * PROMPT
    assert check_stored(engine)


def damage(engine: ScriptedEngine, number: int) -> None:
    """The record of the prompt's chunk of this number has other bytes from now on."""
    index = engine.ours.store.residency.index
    chunk = next(c for c in index if c.name.position == number * CHUNK)
    assert chunk.dram.state is State.ABSENT, "it is in DRAM, where it is right"
    kv: list[bytes] = []
    extend_kv(kv, tokens(0)[: (number + 1) * CHUNK])
    wanted = in_layer(kv[number * CHUNK :], 0).tobytes()
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert transfer is not None
    path = Path(transfer.kv_connector_extra_config["nvme"]["path"]) / SLAB_NAME
    at = path.read_bytes().index(wanted)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in wanted[:64]))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("number", [DRAM_CHUNKS // 2, DRAM_CHUNKS + 2, NUM_CHUNKS - 1])
def test_a_damaged_record(start: Start, depth: int, number: int) -> None:
    """What is before it is loaded, be it in the first part or a later one; the rest is computed."""
    engine, prompt = start(depth), tokens(0)
    store(engine, prompt)
    ask(engine, "other", tokens(1, DRAM_CHUNKS * CHUNK + 1))  # takes all of DRAM
    forget_hbm(engine)
    loaded(engine)
    damage(engine, number)
    ask(engine, "again", prompt)
    assert loaded(engine) == number * CHUNK
    assert check_stored(engine)
    forget_hbm(engine)
    store(engine, prompt, others=0)  # what was computed is stored again
    ask(engine, "once more", prompt)
    assert loaded(engine) >= 0.9 * PROMPT


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_between_two_parts(start: Start, depth: int) -> None:
    """Its blocks are free once, and others that take them are right."""
    engine, prompt = start(depth), tokens(0)
    store(engine, prompt)
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for number in range(4):
        forget_hbm(engine)
        engine.add(f"again {number}", prompt, 2)
        to_a_later_part(engine)
        for _ in range(number):
            engine.step()
        engine.abort(f"again {number}")
        engine.add(f"other {number}", tokens(2 + number, 3 * CHUNK), 2)
        engine.drain()
        wait_until_quiet(engine.ours)
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert check_stored(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reset_between_two_parts(start: Start, depth: int) -> None:
    """What has not come by then never does: vLLM computes it, and nothing of it is stored."""
    engine, prompt = start(depth), tokens(0)
    store(engine, prompt)
    engine.add("again", prompt, 2)
    to_a_later_part(engine)
    before = loaded(engine)
    assert engine.ours.reset()
    engine.drain()
    wait_until_quiet(engine.ours)
    assert 0 < before < PROMPT
    assert loaded(engine) <= 2 * CHUNK  # a part that was held by then
    assert not len(engine.ours.store.residency.index)


def test_a_chunk_that_leaves_nvme_between_two_parts(start: Start) -> None:
    engine, prompt = start(), tokens(0)
    store(engine, prompt)
    engine.add("again", prompt, 2)
    to_a_later_part(engine)
    load = engine.ours.stages.current
    assert load is not None
    lost = load.rest[-2]
    engine.ours.store.drop([lost.chunk])
    engine.drain()
    wait_until_quiet(engine.ours)
    assert loaded(engine) == lost.start // BLOCK * BLOCK
    assert check_stored(engine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_all_of_it_together(start: Start, depth: int, seed: int) -> None:
    """Long prompts and short ones, aborts, resets and lost chunks; HBM is full at times."""
    engine, random = start(depth, num_blocks=70), Random(seed)
    prompts = [tokens(number) for number in range(3)]
    parts = 0
    for number in range(40):
        prompt = random.choice(prompts)[: random.choice((PROMPT, PROMPT, 70, 200))]
        engine.add(str(number), prompt + tokens(number, random.randrange(1, 9)), 3)
        for _ in range(random.randrange(60)):
            engine.step()
            parts += engine.ours.stages.is_open
        if random.random() < 0.15:
            engine.abort(str(random.randrange(number + 1)))
        if random.random() < 0.4:
            engine.scheduler.reset_prefix_cache()
        if random.random() < 0.1:
            chunks = list(engine.ours.store.residency.index)
            engine.ours.store.drop(random.sample(chunks, min(2, len(chunks))))
        if random.random() < 0.05:
            engine.ours.reset()
    engine.drain()
    wait_until_quiet(engine.ours)
    check_stored(engine)
    assert parts
