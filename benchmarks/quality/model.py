# SPDX-License-Identifier: Apache-2.0
"""A small Llama in plain PyTorch: RoPE (NeoX pairing), GQA, RMSNorm, SwiGLU.

Modules are named as in transformers' LlamaForCausalLM, so a state dict is an export. K leaves a
layer rotated at its token's position, as it lies in a server's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

NORM_EPS = 1e-5
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Counts; `window` is the context window in tokens."""

    vocabulary: int = 2_048
    window: int = 512
    layers: int = 6
    hidden: int = 256
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; it must be a multiple of {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns pairs")


class Kv(NamedTuple):
    """One layer's K and V, [sequences, kv_heads, tokens, head_dim] each."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.k.shape[2])

    def cut(self, start: int, stop: int | None = None) -> Kv:
        """The tokens from `start` to `stop`; views."""
        return Kv(self.k[:, :, start:stop], self.v[:, :, start:stop])

    def then(self, other: Kv) -> Kv:
        return Kv(torch.cat((self.k, other.k), 2), torch.cat((self.v, other.v), 2))

    def to(self, dtype: torch.dtype) -> Kv:
        return Kv(self.k.to(dtype), self.v.to(dtype))


class Rotation(NamedTuple):
    """Cosines and sines, [tokens, head_dim] each, fp32: the two halves of a row are equal."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotation(positions: torch.Tensor, head_dim: int) -> Rotation:
    """The rotation by `positions` (int64, [tokens], may be negative). Angles are in fp64."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions.to(torch.float64)[:, None] * ROPE_THETA**-pairs
    angles = torch.cat((angles, angles), dim=-1)
    return Rotation(angles.cos().float(), angles.sin().float())


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turn pairs (i, i + head_dim / 2) of x, [..., tokens, head_dim]; in fp32, given as x was."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * by.cos + torch.cat((-second, first), dim=-1) * by.sin).to(x.dtype)


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, by: Rotation, past: Kv | None, stored: torch.dtype | None
    ) -> tuple[torch.Tensor, Kv]:
        def heads(flat: torch.Tensor) -> torch.Tensor:
            return flat.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), by)
        new = Kv(rotate(heads(self.k_proj(x)), by), heads(self.v_proj(x)))
        if stored is not None:
            new = new.to(stored)
        every = new if past is None else past.then(new)
        mixed = attend(query, every.to(query.dtype), causal=past is None)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), new


def attend(query: torch.Tensor, kv: Kv, *, causal: bool) -> torch.Tensor:
    """Attention of the last tokens of `kv` to all tokens up to themselves.

    query: [sequences, heads, new tokens, head_dim]. causal says that all tokens are new.
    """
    new, total, group = query.shape[2], kv.tokens, query.shape[1] // kv.k.shape[1]
    if torch.is_grad_enabled():
        # PyTorch's fused attention for the CPU takes two to four times as long to differentiate.
        wide = query.unflatten(1, (-1, group)).flatten(2, 3)
        scores = wide @ kv.k.transpose(-1, -2) * query.shape[3] ** -0.5
        future = torch.full((new, total), -math.inf, dtype=scores.dtype).triu(total - new + 1)
        mixed = torch.softmax(scores + future.repeat(group, 1), dim=-1) @ kv.v
        return mixed.unflatten(2, (group, new)).flatten(1, 2)
    k, v = (t.repeat_interleave(group, dim=1) for t in kv)
    mask = None if causal else torch.ones(new, total, dtype=torch.bool).tril(total - new)
    return functional.scaled_dot_product_attention(query, k, v, mask, is_causal=causal)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(
        self, x: torch.Tensor, by: Rotation, past: Kv | None, stored: torch.dtype | None
    ) -> tuple[torch.Tensor, Kv]:
        mixed, new = self.self_attn(self.input_layernorm(x), by, past, stored)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), new


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)


class Llama(nn.Module):
    """Embeddings and output are tied. initial.py has better weights to begin with."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def run(
        self,
        tokens: torch.Tensor,
        *,
        start: int = 0,
        past: list[Kv] | None = None,
        stored: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, list[Kv]]:
        """Run tokens [sequences, n], int64, at positions start, start + 1, ...

        past: one Kv a layer, what the tokens attend to before themselves; used as it is.
        stored: K and V are rounded to this dtype before they are used, as a server's cache does.
        Returns: hidden states [sequences, n, hidden], after the last norm; the n tokens' own Kv.
        """
        positions = torch.arange(start, start + tokens.shape[1])
        by = rotation(positions, self.shape.head_dim)
        x, new = self.model.embed_tokens(tokens), []
        for number, layer in enumerate(self.model.layers):
            x, kv = layer(x, by, None if past is None else past[number], stored)
            new.append(kv)
        return self.model.norm(x), new

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [sequences, n, vocabulary] of tokens [sequences, n] from position 0."""
        hidden, _ = self.run(tokens)
        return self.lm_head(hidden)

    def states(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Hidden states after each layer, as the last norm sees them, of tokens as forward's."""
        by = rotation(torch.arange(tokens.shape[1]), self.shape.head_dim)
        x, found = self.model.embed_tokens(tokens), []
        for layer in self.model.layers:
            x, _ = layer(x, by, None, None)
            found.append(self.model.norm(x))
        return found

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())
