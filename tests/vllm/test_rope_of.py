# SPDX-License-Identifier: Apache-2.0
"""Which rotary embeddings of vLLM's K can be moved with, and which are refused with a reason.

It is long since each rotary embedding has its case here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.rotary_embedding import get_rope

from attnstore_vllm.connector.model_rotation import ropes_of
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.rope import NO_ROPE, Rope

HEAD, LENGTH = 64, 4096
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


class Projections(torch.nn.Module):
    """Q, K and V of two heads."""

    input_size = 48

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(2)
        weight = torch.randn(3 * 2 * HEAD, self.input_size, generator=random)
        self.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        return (hidden @ self.weight.T).chunk(3, dim=-1)


class Layer(torch.nn.Module):
    """As vLLM's models have them: an attention layer, and what turns its K, side by side."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.qkv_proj = Projections(rope.cos_sin_cache.dtype if rope is not None else BF16)
        self.attn = torch.nn.Module()
        self.attn.head_size = HEAD
        self.k_norm = torch.nn.RMSNorm(2 * HEAD)
        random = torch.Generator().manual_seed(3)
        self.k_norm.weight.data = torch.rand(2 * HEAD, generator=random).to(BF16) + 0.5
        self.turns = self.norms = True
        if rope is not None:
            self.rotary_emb = rope

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        q, k, v = self.qkv_proj(hidden_states)
        return self.attend(positions, q, k, v)

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q.contiguous(), k.contiguous())
        return self.attn(q, k.view(-1), v)


def made(is_neox: bool = True, **parameters: Any) -> Any:
    given = {"rope_type": "default", "rope_theta": 10_000.0, **parameters}
    return get_rope(HEAD, LENGTH, is_neox, given, torch.bfloat16)


def rope_of(model: torch.nn.Module, layers: dict[str, Any]) -> Rope:
    """Of one group."""
    (rope,) = ropes_of(model, [layers])
    return rope


def found(*ropes: Any) -> Any:
    model = torch.nn.ModuleList(Layer(rope) for rope in ropes)
    return rope_of(model, {str(i): layer.attn for i, layer in enumerate(model)})


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


def turn(layer: Layer, positions: Any, q: Any, k: Any) -> Any:
    return layer.rotary_emb(positions, q.contiguous(), k.contiguous())


class Sometimes(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        if self.turns:
            q, k = turn(self, positions, q, k)
        return self.attn(q, k, v)


class ByChance(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        if positions[0]:
            q, k = turn(self, positions, q, k)
        return self.attn(q, k, v)


class Normed(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        if self.norms:
            k = self.k_norm(k)
        return self.attn(q, k, v)


class NormedBefore(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, self.k_norm(k))
        return self.attn(q, k, v)


class Doubled(Layer):
    """K is another, and turns all the same."""

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        k.mul_(2)
        return self.attn(q, k, v)


class PartOfIt(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        k[..., 0] = 1
        return self.attn(q, k, v)


class ByAnOperator(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        torch.relu_(k)
        return self.attn(q, k, v)


class Another(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, turned = turn(self, positions, q, k.clone())
        return self.attn(q, k, v), turned


class Twice(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        q, k = turn(self, positions, q, k)
        return self.attn(q, k, v)


class Backwards(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, 4000 - positions, q, k)
        return self.attn(q, k, v)


class Zeros(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        return self.attn(q, k * 0, v)


class Never(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        return q


class NearlyOnes(Layer):
    """A norm's weights after the rotation, none of them more than 3 % from 1."""

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        return self.attn(q, k * (1 + 0.06 * (self.k_norm.weight - 1)), v)


class FarScaled(Layer):
    """As with Llama 4's temperature, were it K's: positions of more than 2,000 differ."""

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        return self.attn(q, k * (1 + 0.1 * (positions > 2000)).to(k.dtype)[:, None], v)


class Catches(Layer):
    """What is raised to end its forward pass is not for it."""

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = turn(self, positions, q, k)
        try:
            return self.attn(q, k, v)
        except Exception:
            return self.attn(q, k * 0, v)


class CompilerError(Exception):
    """As Triton's, which is no RuntimeError."""


class Raises(Layer):
    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        raise CompilerError("no compiler\nand more")


class WithMore(Layer):
    def forward(self, positions: Any, hidden_states: Any, gate: Any) -> Any:  # type: ignore[override]
        return gate


OTHERWISE = "does not cache K as its rotary embedding turns it"


@pytest.mark.parametrize(("kind", "turns", "norms", "why"), [
    (Layer, True, True, None), (NormedBefore, True, True, None), (Doubled, True, True, None),
    (Sometimes, True, True, None), (Sometimes, False, True, OTHERWISE),
    (Normed, True, False, None), (Normed, True, True, OTHERWISE),
    (ByChance, True, True, OTHERWISE), (PartOfIt, True, True, OTHERWISE),
    (ByAnOperator, True, True, OTHERWISE), (Another, True, True, OTHERWISE),
    (Twice, True, True, OTHERWISE), (Backwards, True, True, OTHERWISE),
    (Zeros, True, True, "a K of zeros"), (Never, True, True, "did not hand K"),
    (NearlyOnes, True, True, OTHERWISE), (FarScaled, True, True, OTHERWISE),
    (Catches, True, True, None), (Raises, True, True, "not be tried: CompilerError: no compiler$"),
    (WithMore, True, True, "takes .*'gate'"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "GPT-J", "a part of the head", "YaRN"])
def test_k_turns_with_its_position(
    kind: type[Layer], turns: bool, norms: bool, why: str | None, name: str
) -> None:
    rope = made(**STATIC[name])
    model = kind(rope)
    model.turns, model.norms = turns, norms
    if why is None:
        assert rope_of(model, {"0": model.attn}).rotary_dim == rope.rotary_dim
        return
    with pytest.raises(UnsupportedError, match=why):
        rope_of(model, {"0": model.attn})
    assert "forward" not in model.attn.__dict__, "the layer computes again"


def test_one_layer_of_many_that_does_not_turn() -> None:
    rope = made()
    model = torch.nn.ModuleList([Layer(rope), Sometimes(rope), Layer(rope)])
    model[1].turns = False
    with pytest.raises(UnsupportedError, match="layer 1: Sometimes does not cache"):
        rope_of(model, {str(i): layer.attn for i, layer in enumerate(model)})


class Bare(Layer):
    """No rotary embedding beside it, as Llama 4's layers without positions."""

    def __init__(self, rope: Any) -> None:
        super().__init__(None)

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        return self.attn(q, k, v)


class Learned(Bare):
    """Its K has a position all the same."""

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        return self.attn(q, k + positions[:, None].to(k.dtype), v)


def of_groups(*groups: list[torch.nn.Module]) -> list[Rope]:
    layers = [[(f"{g}.{i}", layer) for i, layer in enumerate(x)] for g, x in enumerate(groups)]
    model = torch.nn.ModuleList([layer for x in groups for layer in x])
    return ropes_of(model, [{name: layer.attn for name, layer in x} for x in layers])


def test_each_group_has_its_own_rotation() -> None:
    one, other = made(), made(rope_theta=1_000_000.0)
    found = of_groups([Layer(one), Layer(one)], [Layer(other)])
    assert [rope.theta[1] for rope in found] == pytest.approx(
        [10_000.0 ** (-1 / 32), 1_000_000.0 ** (-1 / 32)]
    )
    with pytest.raises(UnsupportedError, match="do not all rotate K alike"):
        of_groups([Layer(one), Layer(other)], [Layer(other)])


@pytest.mark.parametrize("kind", [Bare, Sometimes])
def test_a_group_that_does_not_rotate_beside_one_that_does(kind: type[Layer]) -> None:
    def still() -> Layer:
        layer = kind(made())
        layer.turns = False
        return layer

    assert of_groups([still(), still()], [Layer(made())])[0] is NO_ROPE
    with pytest.raises(UnsupportedError, match=OTHERWISE if kind is Sometimes else "has 0 rotary"):
        of_groups([still(), Layer(made())], [Layer(made())])
    with pytest.raises(UnsupportedError, match=OTHERWISE if kind is Sometimes else "has 0 rotary"):
        of_groups([still()], [still()])  # where its positions are nobody knows


def test_k_with_a_position_and_no_rotary_embedding() -> None:
    with pytest.raises(UnsupportedError, match=r"layer 0\.0: Learned " + OTHERWISE):
        of_groups([Learned(None)], [Layer(made())])


def test_a_layer_that_is_in_no_module_is_not_tried() -> None:
    model = Layer(made())
    with pytest.raises(UnsupportedError, match="layer x has 0 rotary"):
        ropes_of(model, [{"0": model.attn}, {"x": torch.nn.Module()}])


class Counts(Layer):
    asked = 0

    def attend(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        self.asked += 1
        return super().attend(positions, q, k, v)


def test_each_layer_is_asked_as_often_whatever_became_of_others() -> None:
    """Ranks of a model that normalizes K over all of them wait for each other's questions."""
    rope = made()
    fine = torch.nn.ModuleList([Counts(rope), Counts(rope)])
    rope_of(fine, {str(i): layer.attn for i, layer in enumerate(fine)})
    model = torch.nn.ModuleList([Zeros(rope), Counts(rope), Sometimes(rope), Counts(rope)])
    with pytest.raises(UnsupportedError, match="layer 0: Zeros computes a K of zeros"):
        rope_of(model, {str(i): layer.attn for i, layer in enumerate(model)})
    assert [model[1].asked, model[3].asked] == [fine[0].asked, fine[1].asked]


def test_a_forward_that_the_attention_had_of_its_own_is_there_again() -> None:
    model = Layer(made())
    model.attn.forward = own = lambda *_: None
    rope_of(model, {"0": model.attn})
    assert model.attn.forward is own


class Adapted(BaseLayerWithLoRA):
    """As LoRA's projections before the first step: which adapter a token has is not known."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, hidden: torch.Tensor) -> Any:
        raise IndexError("index 2925037 is out of bounds")


def test_adapters_are_left_out() -> None:
    model = Layer(made())
    model.qkv_proj = adapted = Adapted(model.qkv_proj)
    rope_of(model, {"0": model.attn})
    assert model.qkv_proj is adapted


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
