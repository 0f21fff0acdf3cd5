# SPDX-License-Identifier: Apache-2.0
"""The bytes in HBM after a load are those that were there before the save.

Every layer, every block, every rank; saved in prefill and in decode; with one KV head for each
head, for several, and for all; from DRAM and from NVMe. HBM is overwritten in between, and the
request gets other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import GQA, MHA, MQA, TINY
from tests.vllm.conftest import StartEngine, some_long
from tests.vllm.engine import BLOCK, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

PROMPT = 700
ANSWER = 200
"""The chunks at 512 and 768 are filled, one in part, by decoding."""
STORED = PROMPT + ANSWER - 1
"""The KV of the token that is sampled last is never computed."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "mha": {"shape": MHA, "dram": "40MiB"},
    "gqa": {"shape": GQA, "dram": "20MiB"},
    "mqa, lossless": {"shape": MQA, "dram": "10MiB", "codec": "lossless"},
    "mqa, encoded in DRAM": {
        "shape": MQA,
        "settings": {"dram": {"size": "8MiB", "codec": "lossless"}},
    },
    "gqa two ranks": {"shape": TINY, "dram": "10MiB", "tensor_parallel": 2},
}


@pytest.fixture(scope="module", params=some_long(CONFIGURATIONS, "gqa two ranks"))
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> EngineHost:
    return start_engine(**CONFIGURATIONS[request.param])


def round_trip(engine: Engine, tier: str, seed: str) -> tuple[list[tuple[int, int, int]], int]:
    """(rank, layer, block) where bytes differ, and how many were compared. See the module."""
    prompt = random_tokens((seed, tier), PROMPT)
    saver = engine.submit(prompt, max_tokens=ANSWER)
    blocks: list[int] = []
    while saver not in engine.done:
        engine.step()
        if saver not in engine.done:
            blocks = engine.block_ids(saver)
    before = engine.kv(blocks)
    (answer,) = engine.finish(saver)
    if tier == "nvme":
        engine.evict_dram()
    engine.forget_hbm()
    engine.loaded()

    taken = engine.submit([1] * BLOCK, max_tokens=2, salt=f"taker {seed} {tier}")
    engine.step()
    loader = engine.submit([*prompt, *answer.tokens], max_tokens=2)
    engine.wait_for(lambda: engine.request(loader).num_computed_tokens > 0, engine.step)
    loaded_blocks = engine.block_ids(loader)[: len(blocks)]
    assert loaded_blocks != blocks
    after = engine.kv(loaded_blocks)
    engine.finish(taken, loader)
    loaded = engine.loaded()
    assert loaded == {"dram": 0, "nvme": 0, tier: STORED}, loaded

    (mask, *_) = engine.llm.collective_rpc(token_mask, args=(STORED % BLOCK,))
    before, after = _masked(before, mask), _masked(after, mask)
    wrong = [
        (rank, layer, block)
        for rank, layers in enumerate(before)
        for layer, pages in enumerate(layers)
        for block, page in enumerate(pages)
        if page != after[rank][layer][block]
    ]
    return wrong, sum(len(pages) for layers in before for pages in layers)


def token_mask(worker: Any, tokens: int) -> bytes:
    """0xff for each byte of a page that belongs to the first tokens of its block.

    It is vLLM's own kernel that knows where they are: it writes ones there.
    """
    import torch
    from vllm import _custom_ops as ops

    context = worker.vllm_config.compilation_config.static_forward_context
    layer = next(iter(context.values()))
    _, heads, size, content = worker.model_runner.kv_caches[0].shape
    page = torch.zeros(1, heads, 2 * size, content // 2, dtype=torch.bfloat16)
    keys, values = page.chunk(2, dim=2)
    ones = torch.ones(tokens, heads, content // 2, dtype=torch.bfloat16)
    ops.cpu_attn_reshape_and_cache(ones, ones, keys, values, torch.arange(tokens), layer.isa)
    assert int(page.sum()) == 2 * ones.numel()
    return bytes(255 * (byte > 0) for byte in (page != 0).repeat_interleave(2).tolist())


def _masked(kv: list[list[list[bytes]]], mask: bytes) -> list[list[list[bytes]]]:
    """The last block of each layer without what is beyond the stored tokens."""

    def last(page: bytes) -> bytes:
        return bytes(byte & keep for byte, keep in zip(page, mask, strict=True))

    return [[[*pages[:-1], last(pages[-1])] for pages in layers] for layers in kv]


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_bytes_come_back(engine: EngineHost, tier: str) -> None:
    wrong, compared = engine.call(round_trip, tier, "bytes")
    assert wrong == []
    assert compared == engine.spec.tensor_parallel * engine.spec.shape.layers * _blocks(STORED)


def test_wrong_bytes_are_seen(engine: EngineHost) -> None:
    """Each of these is found, exactly where it is."""
    if engine.spec.shape in (MHA, MQA):
        return  # one shape shows it, on one rank and on two
    layers, blocks = range(engine.spec.shape.layers), range(_blocks(STORED))
    hit: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        "swapped blocks": (layers, blocks[:2]),
        "wrong slot": (layers, blocks[-1:]),
        "skipped layer": (layers[-1:], blocks),
        "unsaved layer": (layers[-1:], blocks),
    }
    ranks = range(engine.spec.tensor_parallel)
    for fault, (in_layers, in_blocks) in hit.items():
        wrong, _ = engine.call_with_fault(fault, round_trip, "dram", fault)
        assert wrong == [(r, x, b) for r in ranks for x in in_layers for b in in_blocks], fault


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
