# SPDX-License-Identifier: Apache-2.0
"""Documents that come back in another order, on a real engine.

Goal: their KV is loaded and turned into place, and what lies between them is computed by a pass of
our own; no request that does not ask for it gets any of it.
Method: layer 0's K and V depend on a token and its position alone: there all is as vLLM computes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.test_truncation import ASKS, _kv_of

DOCUMENTS, LENGTH = 4, 200
ORDER = (2, 0, 3, 1)


def document(number: int) -> list[int]:
    return random_tokens(("document", number), LENGTH)


def store_all(engine: Engine, salt: str) -> None:
    """Each behind another text of its own."""
    for number in range(DOCUMENTS):
        before = random_tokens(("before", number), 33 + 50 * number)
        prompt = [*before, *document(number), *random_tokens(("behind", number), 90)]
        engine.ask(prompt, salt=salt, max_tokens=2, extra_args=ASKS)
    engine.settle()
    engine.forget_hbm()
    engine.loaded()


def prompt_of(order: tuple[int, ...]) -> tuple[list[int], list[range]]:
    """The documents in this order with gaps, and the gaps."""
    tokens, gaps = list[int](), list[range]()
    for number in order:
        gap = random_tokens(("gap", number), 24)
        gaps.append(range(len(tokens), len(tokens) + len(gap)))
        tokens += [*gap, *document(number)]
    return [*tokens, *random_tokens("question", 40)], gaps


def compare(engine: Engine, salt: str) -> dict[str, Any]:
    store_all(engine, salt)
    tokens, gaps = prompt_of(ORDER)
    served, moved = _kv_of(engine, tokens, salt, extra_args=ASKS)
    engine.forget_hbm()
    computed, none = _kv_of(engine, tokens, "another " + salt)
    shape = (len(tokens), TINY.kv_heads, TINY.head_dim)

    def array(raw: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(shape)

    def apart(layer: int, part: int) -> torch.Tensor:
        a, b = array(served[layer][part]), array(computed[layer][part])
        return ((a - b).abs().amax(dim=(1, 2)) / b.abs().max()).float()

    in_gaps = torch.zeros(len(tokens), dtype=torch.bool)
    for gap in gaps:
        in_gaps[gap.start : gap.stop] = True
    return {
        "moved": moved, "none": none,
        "keys": apart(0, 0).max().item(), "values": apart(0, 1).max().item(),
        "gaps in layer 0": max(apart(0, part)[in_gaps].max().item() for part in (0, 1)),
        "first gap": max(apart(n, 0)[: gaps[0].stop].max().item() for n in range(TINY.layers)),
        "later gaps, layer 1": apart(1, 0)[in_gaps][24:].max().item(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    settings = {"truncation": {"share": "everyone", "documents": True}}
    return start_engine(dram="32MiB", shape=TINY, settings=settings)


def test_documents_in_another_order(engine: EngineHost) -> None:
    found = engine.call(compare, "order")
    print(found)
    assert found["none"] == 0
    assert found["moved"] >= DOCUMENTS * (LENGTH - 8)
    assert found["values"] == 0.0
    assert found["keys"] < 0.02, "of bfloat16, turned"
    assert found["gaps in layer 0"] == 0.0
    engine.call(Engine.check_quiet)
