# SPDX-License-Identifier: Apache-2.0
"""Reads KV in HBM as plain numbers, whatever the kernels' own order."""

from __future__ import annotations

from typing import Any

import torch

from attnstore_vllm.connector.model_rotation import content_of


def read_plain(
    worker: Any, layer: int, blocks: list[int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first `tokens` tokens in these blocks, [tokens, heads, dim] float32."""
    runner = worker.model_runner
    kv = runner.kv_caches[layer]
    layers = runner.vllm_config.compilation_config.static_forward_context
    content = content_of(next(iter(layers.values())), kv[:1])
    _, num_heads, block_tokens, width = kv.shape
    found = []
    for side in (content.key, content.value):
        places = torch.from_numpy(side.places(block_tokens, num_heads, width // 2))
        pages = [kv[block].contiguous().view(-1)[places] for block in blocks]
        found.append(torch.cat(pages)[:tokens].float().contiguous())
    return found[0], found[1]
