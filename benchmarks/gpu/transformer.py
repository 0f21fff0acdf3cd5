# SPDX-License-Identifier: Apache-2.0
"""A transformer of Llama's shape with random weights, whose KV is in pages as vLLM's is.

Each layer writes the new tokens' K and V into their blocks, reads all K and V through the block
table, and attends. No vLLM, and no attention kernel but PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int


SHAPE_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
SHAPE_SMALL = ModelShape(4, 1024, 8, 2, 128, 2816, 4096)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights, [in, out] each."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Transformer:
    """Args:
    dtype, device: of the weights, the activations and the KV.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            random = torch.randn((rows, columns), dtype=dtype, device=device)
            return random.mul_(rows**-0.5)

        s = self.shape = shape
        inner = s.heads * s.head_dim
        torch.manual_seed(1)
        self._layers = [
            _Layer(
                qkv=weight(s.hidden, inner + 2 * s.kv_heads * s.head_dim),
                out=weight(inner, s.hidden),
                gate_up=weight(s.hidden, 2 * s.mlp),
                down=weight(s.mlp, s.hidden),
            )
            for _ in range(s.layers)
        ]
        self._embedding = weight(s.vocabulary, s.hidden)
        self._head = weight(s.hidden, s.vocabulary)

    def logits(
        self,
        tokens: torch.Tensor,
        kv: Sequence[torch.Tensor],
        blocks: torch.Tensor,
        mask: torch.Tensor,
        before_attention: Callable[[int], None],
    ) -> torch.Tensor:
        """Of the last token, [vocabulary].

        Args:
            tokens: the new ones, [n], whole blocks.
            kv: a layer's pages, [blocks, 2, tokens, kv_heads, head_dim]. The new tokens' are
                written.
            blocks: the block table, [history + n blocks]; the new tokens' are the last.
            mask: of causal_mask(), for this history and n.
            before_attention: called with the layer's number before its pages are read, as
                vLLM calls wait_for_layer_load.
        """
        x = self._embedding[tokens]
        for number, layer in enumerate(self._layers):
            ready = partial(before_attention, number)
            x = x + self._attend(layer, _norm(x), kv[number], blocks, mask, ready)
            gate, up = (_norm(x) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ layer.down
        return _norm(x[-1]) @ self._head

    def _attend(
        self,
        layer: _Layer,
        x: torch.Tensor,
        kv: torch.Tensor,
        blocks: torch.Tensor,
        mask: torch.Tensor,
        before_attention: Callable[[], None],
    ) -> torch.Tensor:
        s, n = self.shape, len(x)
        parts = (s.heads, s.kv_heads, s.kv_heads)
        q, k, v = (x @ layer.qkv).view(n, -1, s.head_dim).split(parts, dim=1)
        new = torch.stack((k, v)).view(2, -1, BLOCK_TOKENS, s.kv_heads, s.head_dim)
        kv[blocks[-n // BLOCK_TOKENS :]] = new.transpose(0, 1)
        before_attention()
        # [2, kv_heads, all tokens, head_dim]; the query heads of a KV head go as more queries.
        keys, values = kv[blocks].permute(1, 3, 0, 2, 4).flatten(2, 3)
        per_kv = s.heads // s.kv_heads
        q = q.view(n, s.kv_heads, per_kv, s.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        found = functional.scaled_dot_product_attention(q[None], keys[None], values[None], mask)
        found = found[0].view(s.kv_heads, per_kv, n, s.head_dim).permute(2, 0, 1, 3)
        return found.reshape(n, -1) @ layer.out

    def causal_mask(self, history: int, n: int, device: torch.device) -> torch.Tensor:
        """[query heads of a KV head * n, history + n]: what each query may see."""
        whole = torch.ones((n, history + n), dtype=torch.bool, device=device)
        return whole.tril(history).repeat(self.shape.heads // self.shape.kv_heads, 1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])
