# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated where vLLM alone needs no reset: its own cache is empty before the first
request, and there is none with --no-enable-prefix-caching. The store's is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer, Engine
from tests.vllm.prompts import random_tokens
from tests.vllm.test_weights import LENGTH, scale


def ask(engine: Engine, salt: str | None = None) -> tuple[int, Answer]:
    """(tokens loaded, answer)"""
    engine.loaded()
    answer = engine.ask(random_tokens("prompt", LENGTH), max_tokens=5, salt=salt)
    engine.settle()
    return sum(engine.loaded().values()), answer


def train(worker: Any, seed: int) -> None:
    """What comes from a trainer, here: other embeddings."""
    weight = worker.model_runner.model.model.embed_tokens.weight
    weight.data.normal_(generator=torch.Generator().manual_seed(seed))


def update_and_ask(engine: Engine, how: str, what: Any) -> tuple[int, Answer]:
    """As a trainer does: a server comes up, gets the newest weights, and is asked."""
    engine.llm.collective_rpc(train if how == "train" else scale, args=(what,))
    return ask(engine)


def test_an_update_before_the_first_request(start_engine: StartEngine, tmp_path: Path) -> None:
    """The next start of the files finds KV of the updated weights."""
    one = make_model(tmp_path / "one", TINY)
    updated = start_engine(store=tmp_path / "store", vllm={"model": str(one)})
    updated.call(update_and_ask, "train", 1)
    plain = start_engine(store=tmp_path / "store", vllm={"model": str(one)})
    loaded, answer = plain.call(ask)
    _, computed = plain.call(ask, "nobody else")
    assert loaded == 0, "KV of weights that are in no file"
    assert answer.tokens == computed.tokens


def test_two_trainings_of_one_skeleton(start_engine: StartEngine, tmp_path: Path) -> None:
    """--load-format dummy, and the weights from elsewhere, as RL frameworks start vLLM: whatever
    comes, its name is `dummy`. No reset is due: nothing was computed before."""
    one = make_model(tmp_path / "one", TINY)
    vllm = {"model": str(one), "load_format": "dummy"}
    first = start_engine(store=tmp_path / "store", vllm=vllm)
    first.call(update_and_ask, "train", 1)
    second = start_engine(store=tmp_path / "store", vllm=vllm)
    loaded, answer = second.call(update_and_ask, "train", 2)
    _, computed = second.call(ask, "nobody else")
    assert loaded == 0, "KV of another training"
    assert answer.tokens == computed.tokens


def test_an_update_without_a_prefix_cache(start_engine: StartEngine, tmp_path: Path) -> None:
    """Who has no prefix cache has none to reset."""
    engine = start_engine(store=tmp_path / "store", vllm={"enable_prefix_caching": False})
    engine.call(ask)
    loaded, answer = engine.call(update_and_ask, "scale", 4.0)
    _, computed = engine.call(ask, "nobody else")
    assert loaded == 0, "KV of the weights of before"
    assert answer.tokens == computed.tokens
