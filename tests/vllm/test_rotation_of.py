# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's attention puts K and V, found out through its own update of the cache; and what is
refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from attnstore_vllm.connector.model_rotation import content_of
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.page_content import ContentMap
from tests.unit.transfer.moved_memory import LAYOUTS, content_map

HEADS, DIM = 3, 64


class Cpu:
    """What the CPU's update needs of its object."""

    attn_type = AttentionType.DECODER
    kv_cache_dtype = "auto"
    do_kv_cache_update = CPUAttentionBackendImpl.do_kv_cache_update


class Flash:
    """FlashAttention's update, whose operator the CPU's build does not have."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        key_cache, value_cache = kv_cache.transpose(1, 2).split(DIM, dim=-1)
        block, within = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        key_cache[block, within], value_cache[block, within] = key, value


class Fails:
    def do_kv_cache_update(self, *arguments: Any) -> None:
        raise RuntimeError("no metadata")


def layer_of(impl: Any, backend: Any = CPUAttentionBackend, **more: Any) -> Any:
    scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    return SimpleNamespace(impl=impl, attn_backend=backend, head_size=DIM, **scales, **more)


def found(impl: Any, name: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> ContentMap:
    cache = LAYOUTS[name].tensor(1, 5, HEADS, tokens, DIM, dtype)[0]
    return content_of(layer_of(impl, isa="vec"), cache[:1])


def test_the_cpus() -> None:
    wanted = content_map(LAYOUTS["vec"], 128, HEADS, DIM, torch.bfloat16)
    assert found(Cpu(), "vec", 128) == wanted


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_layouts_of_gpus(name: str, dtype: torch.dtype) -> None:
    assert found(Flash(), name, 16, dtype) == content_map(LAYOUTS[name], 16, HEADS, DIM, dtype)


def test_a_block_of_several_blocks_of_the_kernels() -> None:
    for name in ("LBHNC", "LBNHC", "LHBNC"):
        cache = LAYOUTS[name].tensor(1, 6, HEADS, 16, DIM, torch.bfloat16)[0]
        content = content_of(layer_of(Flash()), cache[:2])
        for side, start in ((content.key, 0), (content.value, DIM)):
            at = torch.zeros(2, HEADS, 16, 2 * DIM)
            order = [axis - 1 for axis in LAYOUTS[name].order if axis]
            back = [order.index(axis) for axis in range(4)]
            page = torch.arange(at.numel()).reshape([at.shape[axis] for axis in order])
            page = page.permute(back)[..., start : start + DIM]  # [blocks, heads, tokens, dims]
            wanted = page.transpose(1, 2).flatten(0, 1).numpy()
            assert (side.places(32, HEADS, DIM) == wanted).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str)
def test_quantized_kv_is_refused(dtype: torch.dtype) -> None:
    block = torch.zeros(1, HEADS, 16, 2 * DIM).to(dtype)
    with pytest.raises(UnsupportedError, match="cannot be rotated"):
        content_of(layer_of(Flash()), block)


def test_what_is_not_understood_is_refused() -> None:
    block = torch.zeros(1, HEADS, 16, 2 * DIM)
    inside = SimpleNamespace(forward_includes_kv_cache_update=True)
    for layer, given, why in (
        (layer_of(Flash(), inside), block, "as a part of the attention"),
        (layer_of(object()), block, "as a part of the attention"),
        (layer_of(Fails()), block, "outside of a step: no metadata"),
        (layer_of(Flash()), torch.zeros(1, HEADS, 16, 2 * DIM + 8), "dims for each head"),
        (layer_of(Flash()), torch.zeros(1, 16, 2 * DIM), "dims for each head"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            content_of(layer, given)
