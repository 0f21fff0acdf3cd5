# SPDX-License-Identifier: Apache-2.0
"""With one group a slot has the bytes, and the namespace the facts, that they had before groups
were a seam. The figures are of the code of commit 02bfef6."""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3

from attnstore_vllm.transfer.engine import CpuEngine
from attnstore_vllm.transfer.geometry import Geometry
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
