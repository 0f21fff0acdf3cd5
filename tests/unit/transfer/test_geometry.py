# SPDX-License-Identifier: Apache-2.0
"""With one group a slot has the bytes, and the namespace the facts, that they had before groups
were a seam. The figures are of the code of commit 02bfef6."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3

from attnstore_vllm.transfer.engine import CpuEngine
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.plan import ChunkCopy, pages

RANKS, LAYERS, BLOCKS, SLOTS = 2, 3, 7, 5
SLOTS_DIGEST = "83e38851e3fa254bf7c3146575eee00f139278375edc83ef07337752f273b1ca"


def geometry() -> Geometry:
    return Geometry.uniform(RANKS, LAYERS, block_tokens=16, page_bytes=1024, chunk_tokens=64)


def test_slots_have_the_bytes_that_they_had() -> None:
    g = geometry()
    slots = np.zeros((SLOTS, g.slot_bytes), np.uint8)
    for rank in range(RANKS):
        first = [100 * rank + layer for layer in range(LAYERS)]
        kv = [
            torch.arange(at, at + BLOCKS * 512, dtype=torch.int32).to(torch.int16).view(7, 16, 32)
            for at in first
        ]
        layouts = [describe(str(layer), one, BLOCKS) for layer, one in enumerate(kv)]
        engine = CpuEngine(slots.ctypes.data, SLOTS, rank, g, layouts)
        copies = [ChunkCopy(3, 0, (6, 1, 4, 2)), ChunkCopy(0, 0, (5, 3))]
        engine.save(pages(copies), range(LAYERS))
        engine.close()
    assert blake3(slots.tobytes()).hexdigest() == SLOTS_DIGEST


def test_the_namespace_has_the_facts_that_it_had() -> None:
    """Another name or number here would make every store cold."""
    assert geometry().facts() == {
        "num_ranks": 2,
        "num_layers": 3,
        "block_tokens": 16,
        "page_bytes": 1024,
        "chunk_tokens": 64,
    }


# ---- pipeline stages ------------------------------------------------------------------

STAGES = ((1024, 1024, 2048), (1024,), (2048, 2048))


def of_stage(number: int, num_ranks: int = 6, replicas: int = 1) -> Geometry:
    regions = STAGES[number]
    groups = (Group(16, tuple(f"l{number}.{i}" for i in range(len(regions)))),)
    return Geometry(num_ranks, regions, groups, 64, replicas, STAGES)


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_stages_agree_on_what_a_slot_is(replicas: int) -> None:
    """Each rank's part has room for the stage with most bytes, whichever that has most layers."""
    shapes = [of_stage(number, 6, replicas) for number in range(3)]
    parts = 6 // replicas
    for geometry in shapes:
        assert geometry.rank_bytes == 4 * 4096
        assert geometry.slot_bytes == parts * 4 * 4096
        assert geometry.most_layers == 3
        assert geometry.all_block_bytes == 2 // replicas * (4096 + 1024 + 4096)
        assert [geometry.part_at(rank) for rank in range(6)] == [
            rank // replicas * 4 * 4096 for rank in range(6)
        ]
        assert geometry.of_a_part().slot_bytes == geometry.rank_bytes, "as it lies apart"
    assert [geometry.block_bytes for geometry in shapes] == [4096, 1024, 4096]
    assert [geometry.num_layers for geometry in shapes] == [3, 1, 2]


def test_the_namespace_tells_where_a_pipeline_is_cut() -> None:
    split = {"stages": [[1024, 1024, 2048], [1024], [2048, 2048]]}
    assert of_stage(0).facts().items() >= split.items()
    assert "stages" not in geometry().facts()


def test_a_slot_has_the_parts_of_all_stages() -> None:
    """And zero bytes behind those of smaller ones; each comes back to its own stage."""
    slots = np.zeros((SLOTS, of_stage(0, 3).slot_bytes), np.uint8)
    copies = pages([ChunkCopy(3, 1, (6, 1)), ChunkCopy(0, 0, (5,))])
    tensors: list[list[torch.Tensor]] = []
    for rank, regions in enumerate(STAGES):
        g = of_stage(rank, 3)
        kv = [torch.full((BLOCKS, n), 10 * rank + i + 1).byte() for i, n in enumerate(regions)]
        tensors.append(kv)
        layouts = [describe(str(layer), one, BLOCKS) for layer, one in enumerate(kv)]
        engine = CpuEngine(slots.ctypes.data, SLOTS, rank, g, layouts)
        engine.save(copies, range(len(regions)))
        end = g.part_at(rank) + g.blocks_per_chunk * g.block_bytes
        assert not slots[:, end : g.part_at(rank) + g.rank_bytes].any()
        for one in kv:
            one.zero_()
        engine.load(copies, range(len(regions)))
        engine.close()
    assert set(np.unique(slots)) == {0, 1, 2, 3, 11, 21, 22}
    for rank, kv in enumerate(tensors):
        for layer, one in enumerate(kv):
            assert torch.equal(one[[1, 5, 6]], torch.full_like(one[:3], 10 * rank + layer + 1))
            assert not one[[0, 2, 3, 4]].any()
