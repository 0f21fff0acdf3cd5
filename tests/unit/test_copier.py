# SPDX-License-Identifier: Apache-2.0
"""Copies between HBM and slots: after a save and a load the bytes are those that vLLM wrote."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attnstore_vllm.transfer.copier import CpuCopier
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.plan import ChunkCopy, TransferPlan, plan_load, plan_save

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 3, 24, 2, 4, 6
CHUNK_TOKENS = 12
SLOTS = 7
ORDERS = [
    (0, 1, 2, 3),  # blocks, heads, tokens, content
    (0, 2, 1, 3),  # tokens before heads
    (1, 0, 2, 3),  # heads outermost: a run a head
    (0, 1, 3, 2),  # content before tokens, as the CPU's attention packs keys
]


class Hbm:
    """The KV tensors of one rank, every byte random, and the slots beside them."""

    def __init__(self, order: tuple[int, ...], num_ranks: int = 1, rank: int = 0) -> None:
        sizes = (BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
        torch.manual_seed(7)
        self.layers = []
        for _ in range(LAYERS):
            stored = torch.randint(-(2**15), 2**15, [sizes[axis] for axis in order]).to(torch.int16)
            self.layers.append(stored.permute([order.index(axis) for axis in range(4)]))
        page_bytes = HEADS * BLOCK_TOKENS * CONTENT * 2
        self.geometry = Geometry(num_ranks, LAYERS, BLOCK_TOKENS, page_bytes, CHUNK_TOKENS)
        self.slots = np.zeros((SLOTS, self.geometry.slot_bytes), dtype=np.uint8)
        layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(self.layers)]
        self.copier = CpuCopier(self.slots.ctypes.data, SLOTS, rank, self.geometry, layouts)

    def block(self, layer: int, block_id: int) -> torch.Tensor:
        return self.layers[layer][block_id].clone()

    def blocks(self) -> list[torch.Tensor]:
        return [kv.clone() for kv in self.layers]

    def save(self, *copies: ChunkCopy, plan_id: int = 1) -> None:
        self.copier.save([TransferPlan(plan_id, copies)])

    def load(self, *copies: ChunkCopy, plan_id: int = 1) -> None:
        self.copier.start_loads([TransferPlan(plan_id, copies)])
        for layer in range(LAYERS):
            self.copier.wait_layer(layer)
        self.copier.save([])


@pytest.fixture(params=ORDERS, ids=str)
def hbm(request: pytest.FixtureRequest) -> Iterator[Hbm]:
    hbm = Hbm(request.param)
    yield hbm
    hbm.copier.close()


def test_a_slot_holds_layers_then_blocks(hbm: Hbm) -> None:
    """[layer][block of the chunk][page]: what another rank's or run's copier finds there."""
    hbm.save(ChunkCopy(2, 0, (20, 3)))
    g = hbm.geometry
    pages = hbm.slots[2, : g.rank_bytes].reshape(LAYERS, g.blocks_per_chunk, g.page_bytes)
    for layer in range(LAYERS):
        for block_in_chunk, block_id in ((0, 20), (1, 3)):
            page = np.sort(pages[layer, block_in_chunk].view(np.int16))
            wanted = np.sort(hbm.block(layer, block_id).numpy().ravel())
            assert np.array_equal(page, wanted)
        assert not pages[layer, 2].any()
    assert not np.delete(hbm.slots, 2, axis=0).any()


def test_what_was_saved_is_loaded_into_other_blocks(hbm: Hbm) -> None:
    before = hbm.blocks()
    block_ids = [5, 0, 23, 11, 12]
    saved = plan_save(3, block_ids, 0, CHUNK_TOKENS, block_tokens=BLOCK_TOKENS)
    hbm.save(*saved)
    targets = [9, 10, 22]
    copies = plan_load(
        [(3, 0, CHUNK_TOKENS)], targets, 0, CHUNK_TOKENS,
        block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    hbm.load(*copies)
    for layer in range(LAYERS):
        for source, target in zip(block_ids, targets, strict=False):
            assert torch.equal(hbm.block(layer, target), before[layer][source])
        untouched = [block for block in range(BLOCKS) if block not in targets]
        assert torch.equal(hbm.layers[layer][untouched], before[layer][untouched])


def test_a_tail_whose_last_block_is_partly_filled(hbm: Hbm) -> None:
    """The request's own token in that block is written after start_loads, and must stay."""
    num_tokens = BLOCK_TOKENS + 2
    before = hbm.blocks()
    hbm.save(*plan_save(0, [4, 5], 0, num_tokens, block_tokens=BLOCK_TOKENS))
    copies = plan_load(
        [(0, 0, num_tokens)], [14, 15], 0, num_tokens,
        block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    hbm.copier.start_loads([TransferPlan(1, copies)])
    for layer in range(LAYERS):  # complete in all layers, before any is waited for
        filled = hbm.layers[layer][15][:, :2]
        assert torch.equal(filled, before[layer][5][:, :2])
        hbm.layers[layer][15][:, 2] = 77  # the first token that the request computes
    for layer in range(LAYERS):
        hbm.copier.wait_layer(layer)
        assert torch.equal(hbm.block(layer, 14), before[layer][4])
        assert torch.equal(hbm.layers[layer][15][:, :2], before[layer][5][:, :2])
        assert bool((hbm.layers[layer][15][:, 2] == 77).all())
    hbm.copier.save([])


def test_ranks_have_their_own_part_of_a_slot() -> None:
    first, second = Hbm(ORDERS[0], num_ranks=2, rank=0), Hbm(ORDERS[0], num_ranks=2, rank=1)
    g = first.geometry
    for hbm in (first, second):
        hbm.save(ChunkCopy(1, 2, (8,)))
    assert first.slots[1, : g.rank_bytes].any()
    assert not first.slots[1, g.rank_bytes :].any()
    assert not second.slots[1, : g.rank_bytes].any()
    part = second.slots[1, g.rank_bytes : 2 * g.rank_bytes]
    assert np.array_equal(part, first.slots[1, : g.rank_bytes])


def test_random_plans_against_torch(hbm: Hbm) -> None:
    """Many saves and loads; the model is a dict from (slot, block in chunk) to clones."""
    rng = np.random.default_rng(3)
    stored: dict[tuple[int, int], list[torch.Tensor]] = {}
    for step in range(60):
        blocks = rng.permutation(BLOCKS)[: rng.integers(1, 6)].tolist()
        places = [divmod(int(p), 3) for p in rng.permutation(SLOTS * 3)[: len(blocks)]]
        if step % 2:
            known = [place for place in places if place in stored]
            copies = [ChunkCopy(*place, (b,)) for place, b in zip(known, blocks, strict=False)]
            if copies:
                hbm.load(*copies)
            for copy in copies:
                for layer in range(LAYERS):
                    wanted = stored[copy.slot, copy.first][layer]
                    assert torch.equal(hbm.block(layer, copy.block_ids[0]), wanted)
        else:
            hbm.save(*(ChunkCopy(*place, (b,)) for place, b in zip(places, blocks, strict=True)))
            for place, b in zip(places, blocks, strict=True):
                stored[place] = [hbm.block(layer, b) for layer in range(LAYERS)]


def test_plans_are_reported_once_and_when_they_are_complete() -> None:
    hbm = Hbm(ORDERS[0])
    copier = hbm.copier
    copier.save(
        [TransferPlan(1, (ChunkCopy(0, 0, (0,)),)), TransferPlan(2, (ChunkCopy(1, 0, (1,)),))]
    )
    assert copier.finished() == [1, 2]
    assert copier.finished() == []
    copier.start_loads([TransferPlan(3, (ChunkCopy(0, 0, (2,)), ChunkCopy(1, 0, (3,))))])
    assert copier.finished() == []  # layers are still on their way
    copier.wait_layer(0)
    copier.save([TransferPlan(4, (ChunkCopy(2, 0, (4,)),))])
    assert copier.finished() == [3, 4]


def test_a_step_without_a_forward_pass_completes_its_loads() -> None:
    hbm = Hbm(ORDERS[2])
    before = hbm.blocks()
    hbm.save(ChunkCopy(0, 0, (1,)), ChunkCopy(0, 1, (2,)))
    hbm.copier.start_loads([TransferPlan(2, (ChunkCopy(0, 0, (7,)), ChunkCopy(0, 1, (8,))))])
    hbm.copier.save([])
    assert hbm.copier.finished() == [1, 2]
    for layer in range(LAYERS):
        assert torch.equal(hbm.block(layer, 7), before[layer][1])
        assert torch.equal(hbm.block(layer, 8), before[layer][2])
    hbm.copier.start_loads([])
    hbm.copier.wait_layer(0)
    hbm.copier.close()


def test_loads_must_be_completed_before_the_next() -> None:
    hbm = Hbm(ORDERS[0])
    hbm.copier.start_loads([TransferPlan(1, (ChunkCopy(0, 0, (1,)),))])
    with pytest.raises(AssertionError):
        hbm.copier.start_loads([TransferPlan(2, (ChunkCopy(0, 0, (1,)),))])
    hbm.copier.close()
    assert hbm.copier.finished() == [1]


@pytest.mark.parametrize("copy", [(SLOTS, 0, 0), (0, 3, 0), (0, 0, BLOCKS), (-1, 0, 0), (0, 0, -1)])
def test_what_does_not_exist_is_refused_before_anything_moves(copy: tuple[int, int, int]) -> None:
    hbm = Hbm(ORDERS[0])
    before = hbm.blocks()
    good = ChunkCopy(0, 0, (0,))
    for attempt in (hbm.save, hbm.load):
        with pytest.raises(IndexError, match="does not exist"):
            attempt(good, ChunkCopy(*copy[:2], copy[2:]), good)
    assert not hbm.slots.any()
    assert all(torch.equal(kv, was) for kv, was in zip(hbm.layers, before, strict=True))


def test_layers_of_different_strides_are_refused() -> None:
    hbm = Hbm(ORDERS[0])
    layouts = [describe("layer", kv, BLOCKS) for kv in hbm.layers]
    other = Hbm(ORDERS[2])
    layouts[1] = describe("layer", other.layers[1], BLOCKS)
    with pytest.raises(AssertionError):
        CpuCopier(hbm.slots.ctypes.data, SLOTS, 0, hbm.geometry, layouts)
