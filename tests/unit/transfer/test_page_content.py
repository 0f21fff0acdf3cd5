# SPDX-License-Identifier: Apache-2.0
"""What probe() learns of a layout, and what it refuses; and plans of moved loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import ContentMap, ContentSide, Write, probe
from tests.unit.transfer.moved_memory import LAYOUTS, Layout, content_map, put

TYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS, HEADS, DIM = 16, 3, 32


def elements(cache: torch.Tensor) -> torch.Tensor:
    """Of block 0 as a slot has it: its runs one after the other."""
    layout = describe("layer", cache, cache.shape[0])
    item = cache.element_size()
    return torch.cat(
        [
            cache.as_strided((layout.run_bytes // item,), (1,), cache.storage_offset() + at // item)
            for at in layout.run_offsets
        ]
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(16, 3, 32), (128, 1, 64), (32, 2, 96)])
def test_every_element_is_where_the_map_says(
    name: str, dtype: torch.dtype, tokens: int, heads: int, dim: int
) -> None:
    layout = LAYOUTS[name]
    found = content_map(layout, tokens, heads, dim, dtype)
    cache = layout.tensor(1, 2, heads, tokens, dim, dtype)[0]
    plain = torch.randn(2, tokens, heads, dim).to(dtype)
    for view, side in zip(layout.view(cache[0], dim), plain, strict=True):
        put(view, side)
    page = elements(cache)
    for side, wanted in ((found.key, plain[0]), (found.value, plain[1])):
        places = torch.from_numpy(side.places(tokens, heads, dim))
        assert torch.equal(page[places], wanted)


def test_the_maps_of_the_cpu_kernels() -> None:
    vec = content_map(LAYOUTS["vec"], 128, 2, 64, torch.bfloat16)
    assert vec == ContentMap(
        ContentSide(0, 16_384, 128, 0, 1, 64, 0, 128),
        ContentSide(8192, 16_384, 128, 0, 64, 64, 0, 1),
    )
    amx = content_map(LAYOUTS["AMX"], 128, 2, 64, torch.bfloat16)
    assert amx == ContentMap(
        ContentSide(0, 16_384, 16, 1024, 2, 2, 32, 1),
        ContentSide(8192, 16_384, 2, 32, 1, 16, 2048, 2),
    )


def refused(write: Write, why: str, tokens: int = TOKENS, dtype: torch.dtype = TYPES[0]) -> None:
    cache = LAYOUTS["LBHNC"].tensor(1, 2, HEADS, TOKENS, DIM, dtype)[0]
    with pytest.raises(UnsupportedError, match=why):
        probe(write, cache, 2, block_tokens=tokens, num_heads=HEADS, head_dim=DIM)


def plain_write(layout: Layout) -> Write:
    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        for view, side in zip(layout.view(cache[0], DIM), (key, value), strict=True):
            put(view, side)

    return write


def test_orders_that_do_not_fit_are_refused() -> None:
    write = plain_write(LAYOUTS["LBHNC"])

    def permuted(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        write(
            key[:, :, torch.randperm(DIM, generator=torch.Generator().manual_seed(0))], value, cache
        )

    def two_swapped(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        write(key, value, cache)
        last = cache[0, -1, -1]
        last[-2:] = last[-2:].flip(0)

    def swizzled(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        """Dims are rolled by the token, as some kernels do against bank conflicts."""
        rolled = torch.stack([key[token].roll(token, -1) for token in range(len(key))])
        write(rolled, value, cache)

    for other, why in ((permuted, "K of token"), (two_swapped, "V of token"), (swizzled, "K of t")):
        refused(other, why)


def test_values_that_are_changed_or_missing_are_refused() -> None:
    write = plain_write(LAYOUTS["LBHNC"])

    def scaled(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        write(key / 2, value, cache)

    def short(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        write(key, value, cache)
        cache[0, 0, 0, 0] = 0

    def twice(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        write(key, value, cache)
        cache[0, 0, 0, 0] = cache[0, 0, 0, 1]

    refused(scaled, "do not fill a page")
    refused(short, "do not fill a page")
    refused(twice, "twice in a page")
    refused(write, "a page has", tokens=8)
    refused(write, "cannot be rotated", dtype=torch.float8_e4m3fn)


def test_one_head_one_token_one_dim() -> None:
    found = content_map(LAYOUTS["LBHNC"], 1, 1, 1, torch.float32)
    assert found.key.places(1, 1, 1).item() == 0
    assert found.value.places(1, 1, 1).item() == 1
    assert np.array_equal(found.key.places(1, 1, 1).shape, (1, 1, 1))
