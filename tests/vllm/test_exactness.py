# SPDX-License-Identifier: Apache-2.0
"""What comes from the store gives the same answer, to the last bit, as what was in HBM.

Greedy tokens and log-probabilities are compared with ==, between requests that compute the
same tokens with the same split: another split rounds differently.

- A prompt of a whole number of blocks, and one token: vLLM's own prefix cache has all but the
  last token, and so has the store.
- Any other length: a first request leaves KV of `split` tokens, computed in one go, and a
  second one continues it. The reference is computed from nothing, by chunked prefill whose
  first chunk is `split` tokens long.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

BLOCKS = (1, 2, 3, 4, 7, 15)
SPLITS = (16, 17, 127, 129, 200, 255, 273, 300, 383, 511, 790, 1300)
"""Inside the first block, beside the edges of blocks and chunks, in the middle of both."""
CONTINUATION = 37
ANSWER = 6

CONFIGURATIONS = {
    "eager": {},
    "compiled": {"eager": False},
    "two ranks": {"tensor_parallel": 2},
}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> Iterator[EngineHost]:
    # DRAM holds 120 chunks: enough for a test, and a few requests push everything out of it.
    yield start_engine(dram="16MiB", **CONFIGURATIONS[request.param])


Pair = tuple[int, Answer, Answer]
"""Length, reference, from the store."""


def whole_blocks(engine: Engine, tier: str, seed: str) -> tuple[list[Pair], dict[str, int]]:
    """Answers with vLLM's own hit, and with the store's; and what came from which tier."""
    prompts = [random_tokens((seed, tier, n), n * BLOCK + 1) for n in BLOCKS]
    references = []
    for prompt in prompts:
        engine.ask(prompt, max_tokens=ANSWER)
        references.append(engine.ask(prompt, max_tokens=ANSWER))
    loaded_early = engine.loaded()
    assert not any(loaded_early.values()), "the reference is to be vLLM's own hit"
    from_store = _ask_again(engine, tier, prompts)
    lengths = [len(prompt) for prompt in prompts]
    return list(zip(lengths, references, from_store, strict=True)), engine.loaded()


def inside_blocks(engine: Engine, tier: str, seed: str) -> tuple[list[Pair], dict[str, int]]:
    """Answers after chunked prefill, and with the store's KV up to the same token."""
    prompts, references = [], []
    usual = engine.scheduler.max_num_scheduled_tokens
    for split in SPLITS:
        prompt = random_tokens((seed, tier, split), split + min(split, CONTINUATION))
        engine.ask(prompt[:split])
        engine.scheduler.max_num_scheduled_tokens = split
        references.append(engine.ask(prompt, max_tokens=ANSWER, salt=f"{seed} {tier} {split}"))
        engine.scheduler.max_num_scheduled_tokens = usual
        prompts.append(prompt)
    engine.loaded()
    from_store = _ask_again(engine, tier, prompts)
    return list(zip(SPLITS, references, from_store, strict=True)), engine.loaded()


def _ask_again(engine: Engine, tier: str, prompts: list[list[int]]) -> list[Answer]:
    if tier == "nvme":
        engine.evict_dram()
        engine.loaded()
    found = []
    for prompt in prompts:
        engine.forget_hbm()
        found.append(engine.ask(prompt, max_tokens=ANSWER))
    return found


def different(pairs: list[Pair]) -> list[int]:
    return [length for length, reference, got in pairs if reference.content != got.content]


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_whole_blocks_equal_a_hit_in_hbm(engine: EngineHost, tier: str) -> None:
    pairs, loaded = engine.call(whole_blocks, tier, "exact")
    assert loaded == {"dram": 0, "nvme": 0, tier: sum(BLOCKS) * BLOCK}
    for length, reference, got in pairs:
        assert reference.cached_tokens == got.cached_tokens == length - 1
    assert different(pairs) == []


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_inside_blocks_equals_chunked_prefill(engine: EngineHost, tier: str) -> None:
    pairs, loaded = engine.call(inside_blocks, tier, "exact")
    assert loaded == {"dram": 0, "nvme": 0, tier: sum(SPLITS)}
    for split, reference, got in pairs:
        assert (reference.cached_tokens, got.cached_tokens) == (0, split)
    assert different(pairs) == []


def test_wrong_kv_is_seen(engine: EngineHost) -> None:
    """The comparison above notices each of these, at every length."""
    faults = ["late load"]
    if engine.spec.tensor_parallel > 1:
        faults = ["rank 0 only", "skipped layer"]
    elif engine.spec.eager:
        faults += ["wrong slot", "skipped layer", "unsaved layer"]
    for fault in faults:
        pairs, _ = engine.call_with_fault(fault, whole_blocks, "dram", fault)
        assert different(pairs) == [length for length, *_ in pairs], fault


def test_new_tokens_that_a_load_overwrites_are_seen(engine: EngineHost) -> None:
    pairs, _ = engine.call_with_fault("last block by layer", inside_blocks, "dram", "overwrite")
    assert different(pairs) == list(SPLITS)


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
