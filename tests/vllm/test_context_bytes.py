# SPDX-License-Identifier: Apache-2.0
"""Context parallelism, byte by byte: K and V of random prompts are written by vLLM's own operators
where vLLM's own slot mapping puts them on each rank, each rank's worker saves its blocks and loads
them into others, and there they stand as vLLM would have written them.

How many tokens a hit has is drawn too: it ends inside of blocks, where some ranks have less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import LoadPlan, TransferPlan, plan_load, plan_save
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.transfer.pool_files import parts_of
from tests.vllm.context_ranks import Ranks
from tests.vllm.kernel_text import V1, V2, Slots, slots_of
from tests.vllm.test_context_ranks import SPREADS, name_of

BLOCK, CHUNK, BLOCKS, HEADS, DIM, LAYERS = 16, 128, 64, 2, 32, 2
LATENT, ROPE = 48, 16
Write = Callable[[torch.Tensor, Slots, torch.Tensor], None]
"""write(numbers of each token, slots, a layer's tensor)."""
WHERE = [
    pytest.param(HEADS * 2 * DIM, (HEADS, BLOCK, 2 * DIM), id="heads"),
    pytest.param(LATENT + ROPE, (BLOCK, LATENT + ROPE), id="latents"),
]


def write(numbers: torch.Tensor, slots: Slots, cache: torch.Tensor) -> None:
    """K and V, or latents, of tokens: those that the rank has."""
    if cache.dim() == 3:
        scale, latents, rope = torch.ones(1), numbers[:, :LATENT], numbers[:, None, LATENT:]
        slot_mapping = torch.from_numpy(slots.copy())
        update = CPUMLAImpl.do_kv_cache_update
        update(None, latents, rope, cache, slot_mapping, "auto", scale)
        return
    mine = slots >= 0
    both = cache.view(len(cache), HEADS, 2 * BLOCK, DIM)  # as vLLM's backend cuts it
    keys, values = both.chunk(2, dim=2)
    key, value = numbers[torch.from_numpy(mine)].view(-1, 2, HEADS, DIM).unbind(1)
    if len(key):
        where = torch.from_numpy(slots[mine])
        args = key.contiguous(), value.contiguous(), keys, values, where
        ops.cpu_attn_reshape_and_cache(*args, "vec16")


class Rank:
    """A worker with its tensors."""

    def __init__(
        self, name: str, ranks: Ranks, rank: int, shape: tuple[int, ...], geometry: Geometry
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self.tensors = [torch.zeros(BLOCKS, *shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        pool = SharedPool(
            name, 8, geometry.slot_bytes, num_ranks=ranks.count, member=rank,
            num_parts=parts_of(geometry, 8)[0],
        )  # fmt: skip
        self.worker = Worker(pool, rank, geometry, BLOCKS, write_buffer_bytes=lambda _: 0)
        tensors = dict(zip(geometry.layer_names, self.tensors, strict=True))
        self.worker.register_kv_caches(tensors, "kernel")
        self._steps = count(1)

    def write(
        self, numbers: torch.Tensor, block_ids: list[int], ranks: Ranks, into: list[torch.Tensor]
    ) -> None:
        slots = slots_of(
            block_ids, np.arange(numbers.shape[1]), block=BLOCK, ranks=ranks.decode,
            rank=ranks.decode_rank(self.rank), interleave=ranks.interleave,
            which=V2 if ranks.prefill > 1 else V1,
        )  # fmt: skip
        for of_layer, tensor in zip(numbers, into, strict=True):
            write(of_layer, slots, tensor)

    def step(self, plan: StepPlan) -> None:
        plan.number, plan.may_replay = next(self._steps), True
        self.worker.begin_step(plan)
        self.worker.start_load()
        self.worker.end_step()
        self.worker.take_finished()
        assert self.worker.take_report().ranks.total() == len(plan.saves) + len(plan.loads)

    def has(self, numbers: torch.Tensor, block_ids: list[int], ranks: Ranks) -> bool:
        """Whether the blocks are as vLLM writes them: all bytes that belong to a token."""
        written = []
        for fill in (0, 0xFF):  # what both have alike was written
            tensors = [torch.zeros_like(tensor) for tensor in self.tensors]
            for tensor in tensors:
                tensor.view(torch.uint8).fill_(fill)
            self.write(numbers, block_ids, ranks, tensors)
            written.append([tensor.view(torch.uint8) for tensor in tensors])
        for tensor, one, other in zip(self.tensors, *written, strict=True):
            of_tokens = one == other
            if not torch.equal(tensor.view(torch.uint8)[of_tokens], one[of_tokens]):
                return False
        return True


@contextmanager
def ranks_of(ranks: Ranks, width: int, shape: tuple[int, ...], name: str) -> Iterator[list[Rank]]:
    page = BLOCK * width * 2
    tokens = BLOCK * ranks.decode
    geometry = Geometry.uniform(ranks.count, LAYERS, tokens, page, CHUNK)
    made = [Rank(name, ranks, rank, shape, geometry) for rank in range(ranks.count)]
    for path in made[0].worker.pool.paths:
        path.unlink(missing_ok=True)
    yield made
    for rank in made:
        rank.worker.close()


def stories(seed: int, width: int, ranks: Ranks) -> Iterator[tuple[torch.Tensor, int, list[int]]]:
    """Of each prompt: the numbers of all tokens, [layers, tokens, width], how many of them a hit
    has, and blocks of HBM."""
    random, torch_random = Random(seed), torch.Generator().manual_seed(seed)
    size = BLOCK * ranks.decode
    for _ in range(6):
        length = random.randrange(1, 3 * CHUNK)
        stop = min(length, random.choice([length, random.randrange(1, length + 1) // 16 * 16]))
        numbers = torch.randn(LAYERS, length, width, generator=torch_random).bfloat16()
        needed = 2 * -(-length // size)
        yield numbers, stop or length, random.sample(range(1, BLOCKS), needed)


def carry_over(
    made: list[Rank], numbers: torch.Tensor, stop: int, block_ids: list[int]
) -> list[int]:
    """Write a prompt into half of the blocks, save it, and load up to `stop` into the others.
    Returns those."""
    size = made[0].worker.geometry.block_tokens
    length = numbers.shape[1]
    first, second = block_ids[: len(block_ids) // 2], block_ids[len(block_ids) // 2 :]
    starts = range(0, length, CHUNK)
    saves = [
        TransferPlan(n, "a", plan_save(n, first, at, min(CHUNK, length - at), block_tokens=size))
        for n, at in enumerate(starts)
    ]
    slots = [(n, at, min(at + CHUNK, length)) for n, at in enumerate(starts) if at < stop]
    copies = plan_load(slots, second, 0, stop, block_tokens=size, chunk_tokens=CHUNK)
    for rank in made:
        rank.write(numbers, first, rank.ranks, rank.tensors)
        rank.step(StepPlan(saves=saves))
    for rank in made:
        rank.step(StepPlan(loads=[LoadPlan(100, "b", copies)]))
    return second


@pytest.mark.parametrize(("width", "shape"), WHERE)
@pytest.mark.parametrize("ranks", SPREADS, ids=name_of)
def test_each_token_is_where_vllm_reads_it(
    ranks: Ranks, width: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    with ranks_of(ranks, width, shape, f"attnstore-cp-{tmp_path.name}") as made:
        for numbers, stop, block_ids in stories(1, width, ranks):
            loaded = carry_over(made, numbers, stop, block_ids)
            assert all(rank.has(numbers[:, :stop], loaded, ranks) for rank in made)


@pytest.mark.parametrize(("width", "shape"), WHERE)
@pytest.mark.parametrize("other", [Ranks(4, 4, 1, 16), Ranks(4, 2, 1, 1)], ids=name_of)
def test_another_spread_would_be_seen(
    other: Ranks, width: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """So the test before this one sees a token that lies elsewhere."""
    ranks = Ranks(4, 4, 1, 1)
    with ranks_of(ranks, width, shape, f"attnstore-cp-{tmp_path.name}") as made:
        told = stories(2, width, replace(ranks, decode=2))
        numbers, _, block_ids = max(told, key=lambda story: story[0].shape[1])
        loaded = carry_over(made, numbers, numbers.shape[1], block_ids)
        assert not any(rank.has(numbers, loaded, other) for rank in made)
        made[0].rank, made[1].rank = 1, 0
        assert not any(rank.has(numbers, loaded, ranks) for rank in made[:2])
