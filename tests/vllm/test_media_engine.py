# SPDX-License-Identifier: Apache-2.0
"""A real engine that hears: a sound under the `uuid` of another one gets nothing of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.prompts import random_tokens
from tests.vllm.test_namespace_starts import AUDIO, LONG, hears

CAT, DOG = 0.05, 0.11
MEDIA_STOP = 200
"""More tokens than stand before the sound, and fewer than its own."""


def ask(engine: Engine, pitch: float, salt: str | None = None) -> tuple[int, tuple[int, ...]]:
    """Tokens that were loaded for a question about a sound under one `uuid`, and the answer. All of
    vLLM's caches are emptied before."""
    engine.llm.reset_prefix_cache()
    engine.core.reset_mm_cache()
    engine.llm.llm_engine.reset_mm_cache()
    engine.core.reset_encoder_cache()
    tokenizer = engine.llm.get_tokenizer()
    sound = np.sin(np.arange(16_000 * 8) * pitch).astype(np.float32)
    tokens = [*tokenizer.convert_tokens_to_ids([AUDIO[1], AUDIO[0], AUDIO[2]])]
    prompt = {
        "prompt_token_ids": tokens + random_tokens(3, 80),
        "multi_modal_data": {"audio": [(sound, 16_000)]},
        "multi_modal_uuids": {"audio": ["cam-7"]},
    }
    said = engine.ask(prompt, max_tokens=8, salt=salt)
    engine.settle()
    return sum(engine.loaded().values()), said.tokens


@pytest.mark.long
def test_a_dog_under_the_uuid_of_a_cat(start_engine: StartEngine, tmp_path: Path) -> None:
    model = hears(tmp_path / "model")
    vllm = {"model": str(model), "load_format": "dummy", "max_model_len": LONG}
    start = partial(start_engine, store=tmp_path / "store", vllm=vllm)
    engine = start()
    assert engine.call(ask, CAT)[0] == 0
    loaded, tokens = engine.call(ask, DOG)
    assert loaded < MEDIA_STOP, "KV of the cat was loaded for the dog"
    assert tokens == engine.call(ask, DOG, "nobody's")[1]
    assert engine.call(ask, CAT)[0] > MEDIA_STOP
    assert start().call(ask, DOG)[0] > MEDIA_STOP  # after a restart, under the same content
