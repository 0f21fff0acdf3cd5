# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on models that keep no KV of all tokens: requests without one are served, requests
with one are computed, and leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import ModelShape
from benchmarks.rounding import drift
from tests.vllm.adapters import make_adapter
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer, Engine
from tests.vllm.family_checks import PROMPT, forget
from tests.vllm.prompts import random_tokens
from tests.vllm.test_families import SAME_SPLIT, options
from tests.vllm.test_lora import LORA, adapter

LAYERS = {"gemma3": 12, "mistral_window": 6}
ALONE = {"salt": "alone"}


def with_and_without(
    engine: Engine, layers: int, directory: Path
) -> tuple[list[Answer], list[int], list[int]]:
    """A prompt asked of the model, of an adapter, and of both again; then of the adapter under a
    salt of its own. Also what each has loaded, and how many chunks there were after it."""
    prompt = random_tokens("lora", PROMPT)
    shape = ModelShape(
        layers=layers, hidden=256, intermediate=512, heads=8, kv_heads=2, head_dim=32
    )
    lora = adapter(1, make_adapter(directory / "one", shape, seed=1))
    answers, loaded, chunks = [], [], []
    hows: list[dict[str, Any]] = [{}, {"lora": lora}, {}, {"lora": lora}, {"lora": lora, **ALONE}]
    for how in hows:
        forget(engine)
        engine.loaded()
        answers.append(engine.ask(prompt, max_tokens=5, **how))
        engine.settle()
        loaded.append(sum(engine.loaded().values()))
        chunks.append(len(engine.store.residency.index))
    engine.check_quiet()
    return answers, loaded, chunks


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_who_has_no_adapter_is_served(
    name: str, start_engine: StartEngine, models: Path, tmp_path: Path
) -> None:
    how = options(name, models)
    how["vllm"] = {**how["vllm"], **LORA, "max_num_batched_tokens": 256}
    engine = start_engine(**how)
    answers, loaded, chunks = engine.call(with_and_without, LAYERS[name], tmp_path)
    first, adapted, again, adapted_again, alone = answers
    assert loaded == [0, 0, 1_792, 0, 0]
    assert chunks[1] == chunks[0] and chunks[3] == chunks[4] == chunks[2]
    assert drift(first, again) <= SAME_SPLIT
    assert adapted.content == adapted_again.content == alone.content
    assert adapted.content != first.content
    assert "without a LoRA adapter only" in engine.log_text()
