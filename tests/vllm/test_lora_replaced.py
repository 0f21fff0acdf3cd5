# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters whose files are replaced, with vLLM's real engine. test_lora_races.py has more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY
from tests.vllm.adapters import make_adapter
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.test_lora import LORA, adapter

LENGTH = 2 * CHUNK + 1


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(vllm=LORA)


def thrown_out(engine: Engine, directory: Path) -> tuple[Answer, Answer, int]:
    """Returns the old adapter's answer computed, and with the store; and what it loads."""
    prompt = random_tokens("thrown out", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=41)
    old = make_adapter(directory / "old", TINY, seed=41)
    others = [make_adapter(directory / f"other {i}", TINY, seed=50 + i) for i in range(4)]
    engine.ask(prompt[:100], lora=adapter(41, path))
    make_adapter(path, TINY, seed=42)
    for i, other in enumerate(others):
        engine.ask(prompt[:100], lora=adapter(51 + i, other))
    engine.ask(prompt, lora=adapter(41, path), max_tokens=5)  # the new weights
    engine.llm.llm_engine.add_lora(adapter(46, old))
    engine.forget_hbm()
    engine.loaded()
    stored = engine.ask(prompt, lora=adapter(46, old), max_tokens=5)
    loaded = sum(engine.loaded().values())
    engine.forget_hbm()
    return engine.ask(prompt, lora=adapter(46, old), max_tokens=5, salt="alone"), stored, loaded


def test_thrown_out(engine: EngineHost, tmp_path_factory: Any) -> None:
    computed, stored, loaded = engine.call(thrown_out, tmp_path_factory.mktemp("loras"))
    assert (stored.content, loaded) == (computed.content, 0)


def same_path(engine: Engine, directory: Path) -> tuple[Answer, Answer, int]:
    """What /v1/unload_lora_adapter and /v1/load_lora_adapter do: a new id, the same name
    and path. Two requests later HBM is empty."""
    prompt = random_tokens("same path", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=61)
    engine.forget_hbm()
    engine.ask(prompt, lora=adapter(61, path), max_tokens=5)
    make_adapter(path, TINY, seed=62)
    engine.llm.llm_engine.add_lora(adapter(62, path))
    engine.ask(prompt, lora=adapter(62, path), max_tokens=5)
    engine.forget_hbm()
    engine.loaded()
    stored = engine.ask(prompt, lora=adapter(62, path), max_tokens=5)
    loaded = sum(engine.loaded().values())
    engine.forget_hbm()
    return engine.ask(prompt, lora=adapter(62, path), max_tokens=5, salt="alone"), stored, loaded


def test_same_path(engine: EngineHost, tmp_path_factory: Any) -> None:
    computed, stored, loaded = engine.call(same_path, tmp_path_factory.mktemp("loras"))
    assert stored.content == computed.content, loaded
