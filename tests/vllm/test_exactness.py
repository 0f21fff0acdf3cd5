# SPDX-License-Identifier: Apache-2.0
"""What comes from the store gives the same answer, to the last bit, as what was in HBM.

Greedy tokens and log-probabilities are compared with ==; see splits.py for what is compared
with what. Compiled and eager, on one rank and on two, with one KV head for each head, for
several and for all.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import MHA, MQA
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, Engine
from tests.vllm.host import EngineHost
from tests.vllm.splits import BLOCKS, SPLITS, different, inside_blocks, whole_blocks

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # DRAM holds about 120 chunks: enough for a test, and a few requests push everything out.
    "eager": {"dram": "16MiB"},
    "compiled": {"dram": "16MiB", "eager": False},
    "two ranks": {"dram": "16MiB", "tensor_parallel": 2},
    "mha": {"dram": "120MiB", "shape": MHA},
    "mqa": {"dram": "32MiB", "shape": MQA},
}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> EngineHost:
    return start_engine(**CONFIGURATIONS[request.param])


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
    # A short one, or one that ends with its block nearly, may feel it too little.
    assert len(different(pairs)) >= len(SPLITS) - 2


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
