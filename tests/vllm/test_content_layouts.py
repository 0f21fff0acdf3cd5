# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU kernels do with K and V, as probe() finds it: what the unit tests assume."""

from __future__ import annotations

import pytest
import torch

from attnstore_vllm.transfer.page_content import probe
from tests.unit.transfer.moved_memory import LAYOUTS, content_map

ops = pytest.importorskip("vllm._custom_ops")
HEADS = 3


def has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


@pytest.mark.parametrize(
    ("isa", "dtype", "tokens", "dim"),
    [
        ("vec", torch.bfloat16, 128, 64),
        ("vec", torch.float16, 32, 128),
        ("vec", torch.float32, 128, 64),
        ("vec16", torch.bfloat16, 16, 80),
        ("vec16", torch.float32, 16, 64),
        ("amx", torch.bfloat16, 128, 64),
        ("amx", torch.bfloat16, 32, 128),
        ("amx", torch.bfloat16, 128, 96),
    ],
)
def test_the_kernels_layouts(isa: str, dtype: torch.dtype, tokens: int, dim: int) -> None:
    if isa == "amx" and not has_amx():
        pytest.skip("no AMX")
    cache = torch.zeros(2, HEADS, tokens, 2 * dim, dtype=dtype)

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        both = cache.view(2, HEADS, 2 * tokens, dim)  # as vLLM's backend cuts it
        keys, values = both.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(tokens), isa)

    found = probe(write, cache, 2, block_tokens=tokens, num_heads=HEADS, head_dim=dim)
    name = "AMX" if isa == "amx" else "vec"
    assert found == content_map(LAYOUTS[name], tokens, HEADS, dim, dtype)
