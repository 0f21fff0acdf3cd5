# SPDX-License-Identifier: Apache-2.0
"""What is known and not mended: each of these fails, and docs/faults.md says so."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.identity.live_lora import LiveAdapters
from tests.vllm.scripted import CHUNK, ScriptedEngine
from tests.vllm.test_hints import report_of, run

SYSTEM = [n % 47 for n in range(2 * CHUNK)]
ONE = SYSTEM + [n % 31 for n in range(3 * CHUNK + 1)]
TWO = SYSTEM + [n % 29 + 5 for n in range(CHUNK + 1)]
IDLE_S = 1.6


@pytest.mark.xfail(strict=True, reason="who saves from HBM does not know what another has dropped")
@pytest.mark.parametrize("whose", ["server", "request"])
def test_another_conversation_has_met_the_system_prompt_first(
    whose: str, models: Path, tmp_path: Path
) -> None:
    """It drops what has expired of that and stores none. So a look-up of the first conversation
    ends before it meets its own KV that has expired, which its save then drops and takes anew from
    HBM."""
    model = make_model(models / "scripted", TINY, weights=False)
    settings: dict[str, Any] = {"ttl": "1s"} if whose == "server" else {}
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=96, depth=1, seed=1, **settings)
    try:
        run(engine, "a", ONE, **({"ttl": 1} if whose == "request" else {}))
        time.sleep(IDLE_S)
        assert report_of(engine, "other", TWO)["why_not_stored"] == "expired"
        assert report_of(engine, "b", ONE)["hbm_tokens"] > len(SYSTEM)
        assert engine.scheduler.reset_prefix_cache()
        found = report_of(engine, "c", ONE)
    finally:
        engine.close()
    assert found["dram_tokens"] <= len(SYSTEM)


@pytest.mark.xfail(strict=True, reason="who saves from HBM does not know what another has dropped")
def test_the_second_answer_of_the_request_that_meets_it(models: Path, tmp_path: Path) -> None:
    """Of a request for two answers the first child drops what has expired, and the second saves it
    anew from HBM."""
    model = make_model(models / "scripted", TINY, weights=False)
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=96, depth=1, seed=1, ttl="1s")
    try:
        run(engine, "a", ONE)
        time.sleep(IDLE_S)
        for child in ("0_b", "1_b"):
            engine.add(child, ONE, 4)
        engine.drain()
        assert engine.scheduler.reset_prefix_cache()
        found = report_of(engine, "c", ONE)
    finally:
        engine.close()
    assert found["dram_tokens"] == 0


class Held:
    """Of which there are weak references."""

    def __init__(self) -> None:
        self.lora_b = torch.ones(8)


class Manager:
    """Two slots, which vLLM makes of what it holds: here all ones times that."""

    def __init__(self) -> None:
        self.held = Held()
        self.stack = torch.zeros(2, 8)
        self.lora_index_to_id: list[int | None] = [None, None]
        self.modules = {"q": SimpleNamespace(lora_b_stacked=(self.stack,))}

    def list_adapters(self) -> dict[int, Any]:
        return {1: self.held}

    def activate(self) -> None:
        self.lora_index_to_id[0] = 1
        self.stack[0] = self.held.lora_b


@pytest.mark.xfail(strict=True, reason="slots are compared with an earlier look alone")
def test_slots_that_are_written_before_a_first_request() -> None:
    """In a real engine too: add_lora(), slots written, reset, a request; then the same files loaded
    anew are given that one's KV."""
    of_files, of_trainer = Manager(), Manager()
    names = []
    for manager, is_written in ((of_files, False), (of_trainer, True)):
        adapters = LiveAdapters([manager])
        manager.activate()
        if is_written:
            manager.stack[0].mul_(3.0)
        adapters.look()
        names.append(adapters.tell([1])[1])
    assert names[0] != names[1]


@pytest.mark.xfail(strict=True, reason="slots are compared with an earlier look alone")
def test_written_slots_that_are_made_anew() -> None:
    """Another adapter takes the slot: what was written there is gone."""
    manager = Manager()
    adapters = LiveAdapters([manager])
    manager.activate()
    loaded = adapters.tell([1])[1]
    manager.stack[0].mul_(3.0)
    adapters.look()
    assert adapters.tell([1])[1] != loaded
    manager.lora_index_to_id[0] = 2
    manager.stack[0] = 7.0
    adapters.tell([1])
    manager.activate()
    assert adapters.tell([1])[1] == loaded


@pytest.mark.xfail(strict=True, reason="slots are compared with an earlier look alone")
def test_what_is_held_is_written_and_the_slots_are_not() -> None:
    """vLLM goes on computing with its slots. A name made of what is held alone is that of an
    adapter which was loaded so, and computes otherwise."""
    manager, other = Manager(), Manager()
    adapters = LiveAdapters([manager])
    manager.activate()
    adapters.tell([1])
    manager.held.lora_b.mul_(3.0)
    adapters.look()
    other.held.lora_b.mul_(3.0)
    loaded_so = LiveAdapters([other])
    other.activate()
    assert adapters.tell([1]) != loaded_so.tell([1])
