# SPDX-License-Identifier: Apache-2.0
"""Which rotary embeddings of vLLM's K can be moved with, and which are refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from attnstore_vllm.connector.model_rotation import rope_of
from attnstore_vllm.errors import UnsupportedError

HEAD, LENGTH = 64, 4096


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


class Layer(torch.nn.Module):
    """As vLLM's models have them: an attention layer, and what turns its K, side by side."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        self.turns = self.norms = True
        if rope is not None:
            self.rotary_emb = rope

    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        k = k.view(-1)
        return self.attn(q, k, v)


def made(is_neox: bool = True, **parameters: Any) -> Any:
    given = {"rope_type": "default", "rope_theta": 10_000.0, **parameters}
    return get_rope(HEAD, LENGTH, is_neox, given, torch.bfloat16)


def found(*ropes: Any) -> Any:
    model = [Layer(rope) for rope in ropes]
    return rope_of({str(i): layer.attn for i, layer in enumerate(model)})


STATIC: dict[str, dict[str, Any]] = {
    "plain": {},
    "another base": {"rope_theta": 500_000.0},
    "a part of the head": {"partial_rotary_factor": 0.5},
    "GPT-J": {"is_neox": False},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "Llama 3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "NTK": {"rope_type": "ntk", "factor": 4.0},
    "mixed NTK": {"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.3},
    "YaRN": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_static(name: str) -> None:
    rope = made(**STATIC[name])
    given = found(rope, rope)
    assert given.is_neox == rope.is_neox_style
    assert given.rotary_dim == rope.rotary_dim
    # K at one position, turned by the difference, is K at the other.
    table = rope.cos_sin_cache.double().numpy()
    half = rope.rotary_dim // 2
    at = table[:, :half] + 1j * table[:, half:]
    for position, shift in ((100, 7), (9, 300), (1500, -1499)):
        turned = at[position] * np.exp(1j * shift * given.theta)
        assert np.abs(turned - at[position + shift]).max() < 0.02 * abs(at[0, 0])


REFUSED: dict[str, tuple[list[dict[str, Any] | None], str]] = {
    "none": ([None], "0 rotary embeddings"),
    "not all layers": ([{}, None], "0 rotary embeddings"),
    "two kinds": ([{}, {"rope_theta": 500_000.0}], "do not all rotate"),
    "dynamic": ([{"rope_type": "dynamic", "factor": 2.0}], "DynamicNTK"),
    "by sections": ([{"mrope_section": [8, 12, 12]}], "MRotaryEmbedding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    parameters, why = REFUSED[name]
    with pytest.raises(UnsupportedError, match=why):
        found(*(None if p is None else made(**p) for p in parameters))


class Sometimes(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        if self.turns:
            q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class ByChance(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        if positions[0]:
            q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class Normed(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        if self.norms:
            k = self.k_norm(k)
        return self.attn(q, k, v)


class InPlace(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        k.mul_(2)
        return self.attn(q, k, v)


class PartOfIt(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        k[..., 0] = 1
        return self.attn(q, k, v)


class ByAnOperator(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        torch.relu_(k)
        return self.attn(q, k, v)


class Another(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, turned = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v), turned


class Twice(Layer):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


UNUSED = "does not cache K as it was rotated"


@pytest.mark.parametrize(("kind", "turns", "norms", "why"), [
    (Sometimes, True, True, None), (Sometimes, False, True, UNUSED),
    (Normed, True, False, None), (Normed, True, True, "changes K after"),
    (ByChance, True, True, "in some cases only: if positions"),
    (InPlace, True, True, "changes K after"), (PartOfIt, True, True, "changes K after"),
    (ByAnOperator, True, True, "changes K after"), (Another, True, True, UNUSED),
    (Twice, True, True, "more than once"),
])  # fmt: skip
def test_k_is_cached_as_it_was_rotated(
    kind: type[Layer], turns: bool, norms: bool, why: str | None
) -> None:
    model = kind(made())
    model.turns, model.norms = turns, norms
    if why is None:
        assert rope_of({"0": model.attn}).rotary_dim == HEAD
        return
    with pytest.raises(UnsupportedError, match=why):
        rope_of({"0": model.attn})


def test_a_table_that_says_something_else() -> None:
    rope = made(rope_theta=20_000.0)
    rope.cos_sin_cache = rope.cos_sin_cache.clone()
    rope.cos_sin_cache[513] = rope.cos_sin_cache[514]
    rope.cos_sin_cache[512] = rope.cos_sin_cache[514]
    try:
        with pytest.raises(UnsupportedError, match="position 512"):
            found(rope)
    finally:
        rope.cos_sin_cache = rope._compute_cos_sin_cache().to(torch.bfloat16)
