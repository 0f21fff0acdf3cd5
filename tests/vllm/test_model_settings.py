# SPDX-License-Identifier: Apache-2.0
"""Settings that a model reads while it is made, and that are left out of the namespace: what they
do is told by the numbers of its layers. Llama 4 chooses `attn_temperature_tuning` by
--max-model-len and --override-generation-config. It scales Q of some layers, and so K and V of all
later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Answer, Engine, EngineSpec
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

pytest.importorskip("vllm")


def ask_twice(engine: Engine, salt: str) -> tuple[Answer, Answer]:
    """With what is stored, and as a tenant who has nothing stored."""
    tokens = random_tokens("llama4", 400)
    stored = engine.ask(tokens, max_tokens=8)
    computed = engine.ask(tokens, max_tokens=8, salt=salt)
    engine.settle()
    return stored, computed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    directory = tmp_path_factory.mktemp("llama4")
    config = Llama4TextConfig(
        vocab_size=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_size=128,
        intermediate_size=256, intermediate_size_mlp=256, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=65_536,
        initializer_range=0.1, num_hidden_layers=4, no_rope_layers=[0, 1, 0, 1],
        num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=512,
        floor_scale=16, attn_scale=2.0,  # released models: 8192 and 0.1; prompts here are short
    )  # fmt: skip
    config.architectures = ["Llama4ForCausalLM"]
    torch.manual_seed(3)
    made = Llama4ForCausalLM(config).to(torch.bfloat16)
    made.save_pretrained(directory)
    return directory


def start(tmp_path: Path, name: str, model: Path, **vllm: Any) -> tuple[Answer, Answer]:
    vllm |= {
        "model": str(model),
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "mp",  # as with --tensor-parallel-size
        "disable_hybrid_kv_cache_manager": True,
    }
    (tmp_path / "store").mkdir(exist_ok=True)
    spec = EngineSpec(store=tmp_path / "store", models=tmp_path, vllm=vllm, blocks=300)
    with EngineHost(spec, tmp_path / f"{name}.log") as host:
        return host.call(ask_twice, name)


@pytest.mark.long
def test_generation_config_changes_kv(tmp_path: Path, model: Path) -> None:
    off = {"override_generation_config": {"attn_temperature_tuning": False}}
    on = {"override_generation_config": {"attn_temperature_tuning": True}}
    start(tmp_path, "off", model, max_model_len=4096, **off)
    stored, computed = start(tmp_path, "on", model, max_model_len=4096, **on)
    assert stored.cached_tokens == 0, "KV of a model without temperature tuning"
    assert stored.tokens == computed.tokens


@pytest.mark.long
def test_the_longest_prompt_changes_kv(tmp_path: Path, model: Path) -> None:
    start(tmp_path, "short", model, max_model_len=32_768)
    stored, computed = start(tmp_path, "long", model, max_model_len=32_896)
    assert stored.cached_tokens == 0, "KV of a model without temperature tuning"
    assert stored.tokens == computed.tokens
