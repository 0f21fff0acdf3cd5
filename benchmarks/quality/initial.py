# SPDX-License-Identifier: Apache-2.0
"""Weights to begin training with: those from which key-value recall is learned within minutes.

Recall takes two heads in a row: one that adds to each token what the token before it was, and one
that looks for tokens like its own. From plain random weights neither is of use without the other,
and training stays for most of its budget where the answer is guessed among the values seen. So:

- Queries begin close to keys, and outputs as the transpose of values: attention begins by looking
  for similar tokens and adding what it finds. (Trockman and Kolter, Mimetic Initialization of
  Self-Attention Layers, ICML 2023, found both in trained models.)
- The heads of the first KV head of the first layer begin by looking at the token before. What they
  need of every token is the same, so one dimension of the embeddings begins as a constant.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.quality.model import Attention, Llama, rotate, rotation

STD = 0.02
CONSTANT = 5 * STD  # of the first dimension of all embeddings
QUERY_NOISE = 0.3  # over the part that is equal to the key
LOOK_BACK_PAIRS = 8  # the fastest: they tell neighbours apart
LOOK_BACK_GAIN = 3.0  # of each pair, in units of the softmax's argument


@torch.no_grad()
def initialize(model: Llama, seed: int) -> None:
    """Set all weights; the same seed gives the same ones."""
    torch.manual_seed(seed)
    depth = math.sqrt(2 * model.shape.layers)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=STD / (depth if name.endswith("down_proj.weight") else 1))
        else:
            nn.init.ones_(weight)
    for layer in model.model.layers:
        _look_for_similar(layer.self_attn)
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    _look_back(model.model.layers[0].self_attn)


def _look_for_similar(attention: Attention) -> None:
    """Make queries like keys and outputs like values, with as much noise as tells heads apart."""
    shape = attention.shape
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    for head in range(shape.heads):
        own = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        if head % group == 0:
            nn.init.normal_(attention.k_proj.weight[shared], std=shape.hidden**-0.5)
            nn.init.normal_(attention.v_proj.weight[shared], std=shape.hidden**-0.5)
        noise = torch.randn(size, shape.hidden) * (QUERY_NOISE * shape.hidden**-0.5)
        attention.q_proj.weight[own] = attention.k_proj.weight[shared] + noise
        noise = torch.randn(shape.hidden, size) * (QUERY_NOISE * shape.hidden**-0.5)
        attention.o_proj.weight[:, own] = STD * (attention.v_proj.weight[shared].T + noise)


def _look_back(attention: Attention) -> None:
    """Make the first KV head's K, seen one token later, equal to its heads' Q, for any token."""
    shape = attention.shape
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    rms = math.sqrt((CONSTANT**2 + (shape.hidden - 1) * STD**2) / shape.hidden)
    pairs = min(LOOK_BACK_PAIRS, size // 2)
    query = torch.zeros(size)
    query[:pairs] = math.sqrt(LOOK_BACK_GAIN * math.sqrt(size)) / (CONSTANT / rms)
    for head in range(group):
        own = slice(head * size, (head + 1) * size)
        nn.init.normal_(attention.q_proj.weight[own], std=0.1 * STD)
        attention.q_proj.weight[own, 0] = query
    nn.init.normal_(attention.k_proj.weight[:size], std=0.1 * STD)
    one_later = rotation(torch.tensor([1]), size)
    attention.k_proj.weight[:size, 0] = rotate(query[None], one_later)[0]
