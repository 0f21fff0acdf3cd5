# SPDX-License-Identifier: Apache-2.0
"""Regions of models that no CPU runs, by bytes: vLLM's own functions say where the KV is.

Real sizes: DeepSeek V3 (a latent a token), V3.2 (latents and an indexer's keys), padded pages,
Nemotron-NAS, Gemma 4 without the hybrid manager. All layouts in which vLLM can have them.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    kv_cache_groups_tp_replicas,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from attnstore_vllm.connector.support import page_bytes_of
from attnstore_vllm.connector.worker import _digest, _kinds
from attnstore_vllm.transfer.engine import CpuEngine
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe, kinds_of, page_of
from attnstore_vllm.transfer.plan import ChunkCopy, pages

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
)
INDEXER = replace(LATENT, head_size=132, dtype=torch.uint8)
MODELS: dict[str, list[Any]] = {
    "deepseek v3": 3 * [LATENT],
    "deepseek v3.2": [LATENT, INDEXER, LATENT, INDEXER],
    "padded": 3 * [replace(FULL, page_size_padded=8192)],
    "aligned": 2 * [replace(LATENT, block_stride_alignment=8192)],
    "nemotron nas": [FULL, FULL, replace(FULL, num_kv_heads=4), replace(FULL, num_kv_heads=1)],
    "gemma 4": [*3 * [FULL], replace(FULL, head_size=64), *2 * [FULL]],
    "fp8 but for a layer": [FULL, replace(FULL, dtype=torch.uint8), FULL],
}
NUM_BLOCKS, SLOTS = 9, 3
COPIES = [ChunkCopy(2, 0, (8, 1, 5, 3)), ChunkCopy(0, 1, (4, 7))]


def configurations(specs: list[Any], layout: KVCacheLayout) -> tuple[KVCacheConfig, KVCacheConfig]:
    """A worker's and the scheduler's, as vLLM makes them. Skips what vLLM cannot lay out."""
    by_name = {f"l{i}": spec for i, spec in enumerate(specs)}
    is_plain = len(set(specs)) == 1
    spec = specs[0] if is_plain else UniformTypeKVCacheSpecs.from_specs(by_name)
    assert spec is not None
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )  # fmt: skip
    try:
        made = get_kv_cache_config_from_groups(
            config, [KVCacheGroupSpec(list(by_name), spec)], 1 << 30
        )
    except (AssertionError, ValueError) as error:
        pytest.skip(f"vLLM: {error}")
    return made, generate_scheduler_kv_cache_config([made])


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_all_regions(model: str, layout: KVCacheLayout) -> None:
    """What was saved is in the slot where the geometry says, and comes back to other blocks."""
    specs = MODELS[model]
    worker, scheduler = configurations(specs, layout)
    regions = page_bytes_of(worker)
    assert regions == page_bytes_of(scheduler), "both sides come to the same"
    tensors = list(allocate_kv_cache(worker, torch.device("cpu"), layout).values())
    order = [int(name[1:]) for name in allocate_kv_cache(worker, torch.device("cpu"), layout)]
    tensors = [tensors[order.index(i)] for i in range(len(specs))]
    random = np.random.default_rng(1)
    for kv in tensors:
        content = torch.from_numpy(random.integers(0, 250, (*kv.shape[:-1], kv.shape[-1])))
        kv.copy_(content.to(kv.dtype))
    tokens = specs[0].block_size
    geometry = Geometry(1, regions, (Group(tokens),), 4 * tokens)
    layouts = [
        page_of(str(i), describe(str(i), kv, NUM_BLOCKS), regions[i])
        for i, kv in enumerate(tensors)
    ]
    before = [kv.clone() for kv in tensors]
    slots = np.zeros((SLOTS, geometry.slot_bytes), np.uint8)
    engine = CpuEngine(slots.ctypes.data, SLOTS, 0, geometry, layouts)
    engine.save(pages(COPIES), range(len(specs)))
    for layer in range(len(specs)):
        for copy in COPIES:
            for i, block in enumerate(copy.block_ids, copy.first):
                at = geometry.region_at(layer) + i * regions[layer]
                page = slots[copy.slot, at : at + regions[layer]]
                assert np.array_equal(
                    page, _page(before[layer], block, layouts[layer], tensors[layer])
                )
    for kv in tensors:
        kv.zero_()
    back = [ChunkCopy(2, 0, (0, 2, 6, 7)), ChunkCopy(0, 1, (3, 8))]
    for layer in range(len(specs)):  # as the forward pass has it
        engine.load(pages(back), range(layer, layer + 1))
    moved = [
        pair
        for saved, loaded in zip(COPIES, back, strict=True)
        for pair in zip(saved.block_ids, loaded.block_ids, strict=True)
    ]
    for layer, kv in enumerate(tensors):
        for old, new in moved:
            assert torch.equal(kv[new], before[layer][old]), (layer, old)
        for untouched in (1, 4, 5):
            assert not kv[untouched].view(torch.uint8).any()


def _page(before: torch.Tensor, block: int, layout: Any, kv: torch.Tensor) -> Any:
    """A page as a slot holds it: by the tensor's own strides, in their order, then padding."""
    axes = sorted(range(1, kv.dim()), key=lambda axis: (-kv.stride(axis), axis))
    content = before[block].permute([axis - 1 for axis in axes]).contiguous()
    raw = content.view(-1).view(torch.uint8).numpy()
    return np.concatenate([raw, np.zeros(layout.page_bytes - len(raw), np.uint8)])


def test_a_wrong_region_is_seen() -> None:
    """Pages in another order of the regions are other bytes: the check above can fail."""
    worker, _ = configurations(MODELS["nemotron nas"], KVCacheLayout.LBHNC)
    regions = page_bytes_of(worker)[::-1]
    tensors = allocate_kv_cache(worker, torch.device("cpu"), KVCacheLayout.LBHNC)
    layouts = [describe(name, kv, NUM_BLOCKS) for name, kv in tensors.items()]
    geometry = Geometry(1, regions, (Group(16),), 64)
    with pytest.raises(AssertionError):
        CpuEngine(1 << 20, SLOTS, 0, geometry, layouts)


def test_which_region_is_of_which_kind_is_told() -> None:
    """Two models with the same kinds in another order have other facts."""
    found = set()
    for specs in (MODELS["gemma 4"], MODELS["gemma 4"][::-1], MODELS["fp8 but for a layer"]):
        worker, _ = configurations(specs, KVCacheLayout.LBHNC)
        made = allocate_kv_cache(worker, torch.device("cpu"), KVCacheLayout.LBHNC)
        tensors = [made[f"l{i}"] for i in range(len(specs))]
        layouts = [describe(str(i), kv, NUM_BLOCKS) for i, kv in enumerate(tensors)]
        assert len(_kinds(tensors, layouts)) == 2
        found.add(_digest(tensors, layouts))
    assert len(found) == 3
    assert [kind.first for kind in kinds_of(layouts)] == [0, 1, 2]


def test_latents_are_the_same_on_all_ranks() -> None:
    group = [KVCacheGroupSpec(["l0"], LATENT)]
    assert kv_cache_groups_tp_replicas(group, 4) == 4
    one, four = (Geometry(n, (73728,), (Group(64),), 256, replicas=n) for n in (1, 4))
    assert four.slot_bytes == one.slot_bytes
    assert {four.part_at(rank) for rank in range(4)} == {0}
    assert [four.saves(rank) for rank in range(4)] == [True, False, False, False]
    assert four.facts() != one.facts()
