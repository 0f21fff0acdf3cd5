# SPDX-License-Identifier: Apache-2.0
"""Truncated prompts on real engines of models that rotate K in other ways, or in none that K can
be moved with. With -m long: those that differ least from others."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index.prefix import whole_blocks
from benchmarks.rounding import beyond, bound
from tests.vllm.conftest import StartEngine, some_long
from tests.vllm.engine import Answer, Engine
from tests.vllm.prompts import random_tokens
from tests.vllm.test_truncation import ASKS, plain_kv

LENGTH = 1400
"""Tokens; more than the 1,024 that scaled models here were trained on."""
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


def moved_about(prompt: list[int]) -> list[int]:
    """Its third part, 896 tokens further to the front, then the second, 200 further back."""
    return prompt[896:1296] + prompt[200:896]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A random model of two layers with heads of 32 dims."""

    family: str = "llama"
    dtype: str = "bfloat16"
    rope: dict[str, Any] = field(default_factory=dict)
    """Its rope_parameters where they are not PLAIN's."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More of its Hugging Face config."""
    kv_heads: int = TINY.kv_heads
    is_neox: bool = True
    rotary_dim: int = TINY.head_dim
    vllm: dict[str, Any] = field(default_factory=dict)
    """More of vLLM's arguments."""

    def make(self, directory: Path) -> Path:
        """Write config, tokenizer and weights; return the directory."""
        import transformers

        make_model(directory, TINY, weights=False)
        config = transformers.AutoConfig.for_model(self.family, **self._config())
        torch.manual_seed(0)
        dtype = getattr(torch, self.dtype)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, weight in model.named_parameters():
            if "k_norm" in name:  # all ones would be as good before the rotation as behind it
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        model.save_pretrained(directory)
        # Only here: transformers does not make models of all tables that vLLM knows.
        written = json.loads((directory / "config.json").read_text())
        written["rope_parameters"] = PLAIN | self.rope
        (directory / "config.json").write_text(json.dumps(written))
        return directory

    def _config(self) -> dict[str, Any]:
        return {
            "hidden_size": TINY.hidden, "intermediate_size": TINY.intermediate,
            "num_hidden_layers": TINY.layers, "num_attention_heads": TINY.heads,
            "num_key_value_heads": self.kv_heads, "vocab_size": TINY.vocab,
            "max_position_embeddings": TINY.max_position, "initializer_range": 0.1,
            **self.fields,
        }  # fmt: skip


SCALED = {"factor": 4.0, "original_max_position_embeddings": 1024}
MODELS = {
    "pairs as in GPT-J, half of the dims, NTK": Model(
        family="gptj", kv_heads=TINY.heads, is_neox=False, rotary_dim=16,
        rope={"rope_type": "ntk", "factor": 4.0}, fields={"rotary_dim": 16},
    ),
    "linear, float32": Model(dtype="float32", rope={"rope_type": "linear", "factor": 4.0}),
    "Llama 3": Model(rope={
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}),
    "YaRN, a quarter of the dims, float16": Model(
        dtype="float16", rotary_dim=8,
        rope={"rope_type": "yarn", "partial_rotary_factor": 0.25, **SCALED},
    ),
    # At start LoRA's projections do not know which adapter a token has.
    "a norm before the rotation, LoRA": Model(
        family="qwen3", fields={"head_dim": TINY.head_dim},
        vllm={"enable_lora": True, "max_loras": 1, "max_lora_rank": 8},
    ),
}  # fmt: skip

UNITS = {
    "bfloat16": 2.0,
    "float16": 2.0,
    # vLLM's tables are of angles in float32. Those of up to 1,400 radians are off by up to 2^-14,
    # once at either position, and this is of the pair's norm what 2^-23 is one unit of.
    "float32": 2.0 + 2 * 2.0 ** (23 - 14),
}
"""Units in the last place of the pair's norm that K may differ by."""


@dataclass(frozen=True, slots=True)
class Compared:
    """K and V of moved tokens in layer 0, and what vLLM computes there."""

    moved: int
    units: float
    """The largest difference of K's rotated dims, in units in the last place of the pair's norm."""
    turned: float
    """The same of K as it was stored: what the rotation is for."""
    same_rest: bool
    """Whether K's other dims are the same."""
    same_values: bool


def kv_of(engine: Engine, prompt: list[int], salt: str, **how: Any) -> list[tuple[bytes, bytes]]:
    """K and V of each layer in HBM when the first token was said."""
    number = engine.submit(prompt, salt=salt, max_tokens=3, **how)
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    blocks = engine.block_ids(number)
    (layers,) = engine.llm.collective_rpc(plain_kv, args=(blocks, len(prompt)))
    engine.finish(number)
    engine.drain()
    return list(layers)


def moved_tokens(engine: Engine) -> int:
    return int(engine.metric("moved_tokens", "dram"))


def compare(engine: Engine, model: Model) -> Compared:
    """All but the last 40 tokens of the second prompt are moved."""
    prompt = random_tokens("models", LENGTH)
    kept = moved_about(prompt)
    stored = kv_of(engine, prompt, "moved", extra_args=ASKS)
    engine.forget_hbm()
    served = kv_of(engine, kept + random_tokens("new", 40), "moved", extra_args=ASKS)
    engine.forget_hbm()
    computed = kv_of(engine, kept + random_tokens("new", 40), "computed")

    def layer_0(layers: list[tuple[bytes, bytes]], side: int) -> torch.Tensor:
        plain = torch.frombuffer(bytearray(layers[0][side]), dtype=torch.float32)
        return plain.view(-1, model.kv_heads, TINY.head_dim)

    k, wanted, before = (layer_0(layers, 0) for layers in (served, computed, stored))
    before = torch.cat([before[896:1296], before[200:896]])
    tokens, dims = len(kept), model.rotary_dim
    axis = -2 if model.is_neox else -1
    eps = torch.finfo(getattr(torch, model.dtype)).eps

    def units(a: torch.Tensor) -> float:
        pairs, right = (
            x[:tokens, :, :dims].unflatten(-1, (2, dims // 2) if model.is_neox else (dims // 2, 2))
            for x in (a, wanted)
        )
        step = torch.exp2(torch.floor(torch.log2(right.norm(dim=axis, keepdim=True)))) * eps
        return float(((pairs - right).abs() / step).max())

    return Compared(
        moved_tokens(engine),
        units(k),
        units(before),
        torch.equal(k[:, :, dims:], wanted[:, :, dims:]),
        torch.equal(layer_0(served, 1), layer_0(computed, 1)),
    )


@pytest.mark.parametrize("name", some_long(MODELS, "Llama 3", "linear, float32"))
def test_layer_0_is_what_vllm_computes(
    start_engine: StartEngine, tmp_path: Path, name: str
) -> None:
    model = MODELS[name]
    path = model.make(tmp_path / "model")
    host = start_engine(dram="32MiB", vllm={"model": str(path), "dtype": model.dtype, **model.vllm})
    found = host.call(compare, model)
    assert found.moved == len(moved_about([0] * LENGTH)), host.log_text()
    assert found.units <= UNITS[model.dtype]
    assert found.turned > 100 * UNITS[model.dtype], "the test can fail"
    assert found.same_rest
    assert found.same_values


NO_ROPE = (
    "has 0 rotary embeddings beside it; K can be moved where there is one (not with ALiBi, learned "
    "positions or none)"
)
REFUSED = {
    "ALiBi": (
        Model(family="bloom", kv_heads=TINY.heads, fields={"n_head": TINY.heads, "n_layer": 2}),
        NO_ROPE,
    ),
    "learned positions": (
        Model(
            family="opt", kv_heads=TINY.heads,
            fields={"ffn_dim": TINY.intermediate, "word_embed_proj_dim": TINY.hidden},
        ),
        NO_ROPE,
    ),
    "dynamic": (
        Model(rope={"rope_type": "dynamic", "factor": 4.0}),
        "its rotary embedding is DynamicNTKScalingRotaryEmbedding",
    ),
    "one layer that does not rotate": (
        Model(
            family="exaone4",
            fields={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096},
            vllm={"disable_hybrid_kv_cache_manager": True},
        ),
        "layer model.layers.1.self_attn.attn: Exaone4Attention does not cache K as its rotary",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refused:
    """What a request of the same tokens, and one of a part of them, come to."""

    moved: int
    loaded: list[int]
    """Tokens that came from the store, of the repeated request and of the part."""
    same_kv: bool
    """Whether it has there what the first computed, bit by bit, in all layers."""
    answers: list[tuple[Answer, Answer]]
    """Of the repeated one and of the part: without the store, and with."""


def refuse(engine: Engine) -> Refused:
    prompt = random_tokens("models", LENGTH)
    kept = moved_about(prompt)
    answers, loaded = [], []
    first = kv_of(engine, prompt, "asks", extra_args=ASKS)
    for wanted in (prompt, kept):
        engine.forget_hbm()
        expected = engine.ask(wanted, salt="reference", max_tokens=8)
        engine.forget_hbm()
        engine.loaded()
        answers.append((expected, engine.ask(wanted, salt="asks", max_tokens=8, extra_args=ASKS)))
        loaded.append(engine.loaded()["dram"])
    engine.forget_hbm()
    again = kv_of(engine, prompt, "asks", extra_args=ASKS)
    num_bytes = len(first[0][0]) // LENGTH * loaded[0]
    same = all(
        a[:num_bytes] == b[:num_bytes]
        for sides in zip(first, again, strict=True)
        for a, b in zip(*sides, strict=True)
    )
    return Refused(moved_tokens(engine), loaded, same, answers)


@pytest.mark.parametrize("name", some_long(REFUSED, "learned positions", "dynamic"))
def test_refused_with_the_reason(start_engine: StartEngine, tmp_path: Path, name: str) -> None:
    model, why = REFUSED[name]
    path = model.make(tmp_path / "model")
    host = start_engine(dram="32MiB", vllm={"model": str(path), **model.vllm})
    found = host.call(refuse)
    assert found.moved == 0
    said = [x for x in host.log_text().splitlines() if "truncated prompts are computed: " in x]
    assert len(said) == 1 and why in said[0]
    assert found.loaded == [whole_blocks(LENGTH - 1), 0], "an exact repeat is served"
    assert found.same_kv
    assert beyond(found.answers, bound([])) == []
    host.call(Engine.check_quiet)
