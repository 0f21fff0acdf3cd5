# SPDX-License-Identifier: Apache-2.0
"""Layers that keep KV of different size in one block table, and ranks that keep the same KV.

What comes from DRAM, from NVMe and after a restart gives the answers that vLLM's own hit gives, to
the last bit, and each layer's bytes are those that were saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import MQA
from tests.vllm.conftest import StartEngine, some_long
from tests.vllm.engine import BLOCK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.region_models import KV_HEADS, make_gemma4, make_nemotron_nas
from tests.vllm.splits import BLOCKS, SPLITS, different, inside_blocks, whole_blocks

Make = Callable[[Path], Path]
TOKEN_OF_HEAD = 2 * 32 * 2
"""Bytes of K and V of 32 dims in bfloat16."""


def _own(make: Make, **vllm: Any) -> Callable[[Path], dict[str, Any]]:
    """Settings of an engine with a model that `make` makes."""

    def settings(models: Path) -> dict[str, Any]:
        model = str(make(models / make.__name__))
        both = {"model": model, "skip_tokenizer_init": True, "max_model_len": 4096, **vllm}
        return {"dram": "32MiB", "vllm": both}

    return settings


def _fp8(models: Path) -> dict[str, Any]:
    skip = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}
    return {"dram": "16MiB", "vllm": skip}


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], tuple[int, ...]]] = {
    "nemotron nas": (
        _own(make_nemotron_nas, trust_remote_code=True), tuple(n * TOKEN_OF_HEAD for n in KV_HEADS)
    ),
    "fp8 but for a layer": (_fp8, (TOKEN_OF_HEAD, 2 * TOKEN_OF_HEAD)),
    "gemma 4 without hybrid manager": (
        _own(make_gemma4, disable_hybrid_kv_cache_manager=True),
        (*5 * [2 * TOKEN_OF_HEAD], 4 * TOKEN_OF_HEAD),
    ),
    "two ranks with one head": (
        lambda _: {"dram": "16MiB", "shape": MQA, "tensor_parallel": 2}, 2 * (2 * TOKEN_OF_HEAD,)
    ),
}  # fmt: skip
"""Settings of the engine, and the bytes of a token in each layer."""


@pytest.fixture(scope="module", params=some_long(CASES, "fp8 but for a layer"))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(case: str, start_engine: StartEngine, models: Path) -> EngineHost:
    return start_engine(**CASES[case][0](models))


def geometry_of(engine: Engine) -> tuple[tuple[int, ...], int, int]:
    g = engine.side.geometry
    return g.regions, g.replicas, g.slot_bytes


def test_regions(engine: EngineHost, case: str) -> None:
    tokens = CASES[case][1]
    regions, replicas, slot_bytes = engine.call(geometry_of)
    assert regions == tuple(BLOCK * n for n in tokens)
    assert replicas == engine.spec.tensor_parallel, "one head, two ranks"
    assert slot_bytes == 2 * sum(regions), "stored once"


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_whole_blocks_equal_a_hit_in_hbm(engine: EngineHost, tier: str) -> None:
    pairs, loaded = engine.call(whole_blocks, tier, "regions")
    assert loaded == {"dram": 0, "nvme": 0, tier: sum(BLOCKS) * BLOCK}
    for length, reference, got in pairs:
        assert reference.cached_tokens == got.cached_tokens == length - 1
    assert different(pairs) == []


def test_inside_blocks(engine: EngineHost) -> None:
    pairs, loaded = engine.call(inside_blocks, "dram", "regions")
    assert loaded == {"dram": sum(SPLITS), "nvme": 0}
    assert different(pairs) == []


def bytes_of_a_load(engine: Engine, tier: str, seed: str) -> tuple[list[tuple[int, int]], int]:
    """(rank, layer) where bytes of whole blocks differ from those before the save; how many
    pages were compared."""
    prompt = random_tokens((seed, tier), 5 * BLOCK)
    number = engine.submit(prompt, max_tokens=2)
    blocks: list[int] = []
    while number not in engine.done:
        engine.step()
        if number not in engine.done:
            blocks = engine.block_ids(number)[:5]
            before = engine.kv(blocks)
    (first,) = engine.finish(number)
    if tier == "nvme":
        engine.evict_dram()
    engine.forget_hbm()
    taken = engine.submit([1] * BLOCK, max_tokens=4, salt=seed)
    engine.step()
    # Behind the answer's first token, so that all five blocks are a hit: what is computed beside a
    # load may round otherwise.
    number = engine.submit([*prompt, first.tokens[0], 7], max_tokens=2)
    engine.wait_for(lambda: engine.request(number).num_computed_tokens > 0, engine.step)
    after_blocks = engine.block_ids(number)[:5]
    assert after_blocks != blocks
    after = engine.kv(after_blocks)
    again, _ = engine.finish(number, taken)
    assert again.cached_tokens >= len(prompt)
    engine.loaded()
    wrong = [
        (rank, layer)
        for rank, layers in enumerate(before)
        for layer, pages in enumerate(layers)
        if pages != after[rank][layer]
    ]
    return wrong, sum(len(pages) for layers in before for pages in layers)


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_bytes_come_back(engine: EngineHost, case: str, tier: str) -> None:
    wrong, compared = engine.call(bytes_of_a_load, tier, "bytes")
    assert wrong == []
    assert compared == 5 * len(CASES[case][1]) * engine.spec.tensor_parallel


def test_wrong_kv_is_seen(engine: EngineHost, case: str) -> None:
    last, ranks = len(CASES[case][1]) - 1, range(engine.spec.tensor_parallel)
    for fault in ("skipped layer", "unsaved layer"):
        wrong, _ = engine.call_with_fault(fault, bytes_of_a_load, "dram", fault)
        assert wrong == [(rank, last) for rank in ranks], fault
        pairs, _ = engine.call_with_fault(fault, whole_blocks, "dram", fault)
        assert different(pairs) == [length for length, *_ in pairs], fault


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)


def ask_all(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    answers = [engine.ask(prompt, max_tokens=6) for prompt in prompts]
    engine.settle()
    return answers


def test_after_a_restart(engine: EngineHost, start_engine: StartEngine) -> None:
    """The last of an engine's tests: it ends the engine."""
    prompts = [random_tokens(("restart", n), n * BLOCK + 1) for n in (2, 5)]
    engine.call(ask_all, prompts)
    references = engine.call(ask_all, prompts)
    spec = engine.spec
    other = start_engine(
        store=spec.store,
        shape=spec.shape,
        dram=spec.dram,
        vllm=spec.vllm,
        tensor_parallel=spec.tensor_parallel,
    )
    found = other.call(ask_all, prompts)
    assert [a.cached_tokens for a in found] == [len(p) - 1 for p in prompts]
    assert found == [
        replace(a, cached_tokens=len(p) - 1) for a, p in zip(references, prompts, strict=True)
    ]
