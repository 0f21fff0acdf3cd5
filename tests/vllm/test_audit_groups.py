# SPDX-License-Identifier: Apache-2.0
"""Audited hits of models with windows, with states, and of a pipeline: real engines, in which what
was stored is computed once more and agrees, and a fault in one group or stage is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnstore_lab.testing.family_models import FAMILIES
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.types import Event
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import events
from tests.vllm.test_pipeline import TWO_STAGES

EVERY_HIT = {"audit": {"rate": 1, "tokens": 1_000_000, "stop_after": 1000, "keep": "off"}}
SIGNS, ZEROS, EIGHT_TIMES = DAMAGES = ("other signs", "zeros", "eight times")
EXPONENTS: dict[str, Any] = {
    "bfloat16": (np.uint16, 7), "float16": (np.uint16, 10), "float32": (np.uint32, 23),
}  # fmt: skip
"""The number of a type as bits, and where its exponent begins."""
OUTCOMES = (Event.AGREED.value, Event.DIFFERED.value, Event.NOT_COMPARED.value)
PROMPT = 1_700
CASES = [
    "gemma3",
    pytest.param("qwen3_next", marks=pytest.mark.long),
    pytest.param("pipeline", marks=pytest.mark.long),
    pytest.param("lfm2", marks=pytest.mark.long),
    pytest.param("gpt_oss", marks=pytest.mark.long),
    pytest.param("mistral_window", marks=pytest.mark.long),
    pytest.param("llama4", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(case: str, start_engine: StartEngine, models: Any) -> EngineHost:
    if case == "pipeline":
        return start_engine(**TWO_STAGES | {"dram": "64MiB"}, settings=EVERY_HIT)
    family = FAMILIES[case]
    return start_engine(
        vllm=family.arguments(models / "families"), needs_images=family.needs_images,
        blocks=320, dram="512MiB", nvme="1GiB", settings=EVERY_HIT,
    )  # fmt: skip


def chunks_of(engine: Engine, prompt: list[int]) -> dict[int, list[Any]]:
    """The chunks that a hit on this prompt would have, by group."""
    namespace = engine.side.names.namespace
    assert namespace is not None
    keys = SequenceKeys(root_key(namespace, None, b""), prompt, engine.side.geometry.chunk_tokens)
    from attnstore_vllm.store.lookup import Lookup

    found: dict[int, list[Any]] = {}
    for piece in engine.store.find(Lookup(keys), 0, len(prompt) - 1):
        found.setdefault(piece.group, []).append(piece.chunk)
    return found


def damage(pages: Any, sides: Any, page_bytes: int, how: str) -> None:
    """All numbers of these pages."""
    if how == ZEROS:
        pages[:] = 0
    elif how == SIGNS:
        words = pages[: len(pages) // 4 * 4].view(np.uint32)
        words ^= np.uint32(1 << 31 | 1 << 15)
    else:
        for side in sides:
            kind, exponent = EXPONENTS[side.dtype]
            for page in pages.reshape(-1, page_bytes):
                page[: page_bytes // 4 * 4].view(kind)[side.places] += kind(3 << exponent)


def asks_twice(
    engine: Engine, name: str, damaged: int | None = None, how: str = SIGNS
) -> dict[str, Any]:
    """The same prompt again, with HBM emptied: what it was spared, and what was found since.

    Args:
        damaged: the group whose last stored chunk is another then, in its last layer and rank.
        how: one of DAMAGES.
    """
    prompt = random_tokens(("audited", name, damaged, how), PROMPT)
    engine.ask(prompt, max_tokens=2)
    engine.settle()
    audit: Any = engine.store.audit
    stored = chunks_of(engine, prompt)
    if damaged is not None:
        chunk = stored[damaged][-1]
        assert chunk.dram.state is State.READY
        slot = np.frombuffer(audit.context.pool.slot(chunk.dram.slot), np.uint8)
        unit = audit.comparisons[damaged].units[-1]
        whole = slot[unit.at : unit.at + unit.page_bytes * engine.side.geometry.blocks_per_chunk]
        damage(whole, audit.comparisons[damaged].sides, unit.page_bytes, how)
    engine.forget_hbm()
    before = events(engine, *OUTCOMES)
    answer = engine.ask(prompt, max_tokens=2)
    engine.settle()
    found = {one: n - before[one] for one, n in events(engine, *OUTCOMES).items()}
    return {
        "cached": answer.cached_tokens,
        "groups": {group: len(chunks) for group, chunks in stored.items()},
        "compared": [one is not None for one in audit.comparisons],
        **{one: n for one, n in found.items() if n},
    }


def test_what_is_stored_of_all_groups_agrees(engine: EngineHost) -> None:
    found = engine.call(asks_twice, "agrees")
    print(found)
    assert found["cached"] == 0 and all(found["compared"])
    assert "differed" not in found
    assert found["agreed"] >= sum(found["groups"].values()) - 1, "all, but a last partial block"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_fault_in_any_group_is_found(engine: EngineHost, how: str) -> None:
    groups = engine.call(asks_twice, "groups")["groups"]
    for group in groups:
        found = engine.call(asks_twice, "damaged", group, how)
        assert found.get("differed") == 1, (group, found)
