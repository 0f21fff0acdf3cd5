# SPDX-License-Identifier: Apache-2.0
"""Loads through the read buffer, over the fake driver: how often it is called, and what waits.

That the bytes are right in any order of events, the random stories say (test_cuda_stories.py).
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.cuda_methods import RULES, Copy, Method, Rule, only
from attnstore_vllm.transfer.cuda_read_buffer import READ_SIZE, ReadSize
from tests.cuda_helpers import CudaRig
from tests.cuda_world import KvKind, Rank, Shape, make_ranks
from tests.engine_helpers import ALL, BLOCKS, LAYERS, PAGE_BYTES, table
from tests.fake_driver import native_module
from tests.fake_gpu import BATCH, KERNEL, FakeGpu

THROUGH = only(Method.BUFFER)
CHUNKS, WITHIN = 12, 4
KV = KvKind("LHBNC", torch.int16, layers=8, heads=3, content=8, kernel_tokens=4)
"""A run a head: 64 bytes each, three of them a page."""


def rank_of(fake: FakeGpu, read_size: ReadSize, kv: KvKind = KV) -> Rank:
    """Twelve chunks of four blocks, in as many slots; the blocks lie apart."""
    shape = Shape((kv,), 1, blocks=2 * CHUNKS * WITHIN, within=WITHIN, slots=CHUNKS, rows=1,
                  ranks=1, moves=False, ring_words=None, read_size=read_size)  # fmt: skip
    _, (rank,) = make_ranks(fake, shape, Random(1))
    rank.engine.rules = THROUGH
    random = np.random.default_rng(2)
    for pages in rank.pages:
        pages[:] = random.integers(0, 256, pages.shape, np.uint8)
    return rank


def copier_of(engine: CudaEngine) -> Any:
    """Of the one kind of pages."""
    (copier,) = engine._copiers
    return copier


def all_pages() -> Any:
    places = np.arange(CHUNKS * WITHIN)
    return np.stack([places // WITHIN, places % WITHIN, 2 * places], axis=1).astype(np.int64)


def loaded(fake: FakeGpu, rank: Rank, layers: list[range]) -> dict[str, int]:
    """Calls of the driver; all blocks must have their slots' bytes."""
    before = {call: fake.count(call) for call in (KERNEL, BATCH)}
    pages = all_pages()
    for some in layers:
        event = rank.engine.load(pages, some)
    rank.engine.wait(event)
    for layer, of_slots in enumerate(rank.pages):
        found = rank.read(layer)[pages[:, 2]]
        assert np.array_equal(found, of_slots.reshape(CHUNKS * WITHIN, -1))
    rank.engine.close()
    return {call: fake.count(call) - before[call] for call in before}


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize(("pages_a_span", "parts"), [(48, 1), (20, 3), (100, 1), (1, 48)])
def test_a_fill_and_a_scatter_for_each_layer_and_span(
    fake: FakeGpu, by_layer: bool, pages_a_span: int, parts: int
) -> None:
    rank = rank_of(fake, ReadSize(3, pages_a_span * KV.block_bytes))
    layers = [range(i, i + 1) for i in range(8)] if by_layer else [range(8)]
    uploads = fake.uploads
    assert loaded(fake, rank, layers) == {KERNEL: 8 * parts, BATCH: 8 * parts}
    assert fake.uploads == uploads + 1, "all layers and spans have one table"


def test_runs_are_as_long_as_a_chunks_layer(fake: FakeGpu) -> None:
    """Of scattered blocks whose heads lie apart, DMA has a run for each head of each block."""
    rank, native = rank_of(fake, ReadSize(2, 48 * KV.block_bytes)), native_module()
    copier, pages = copier_of(rank.engine), all_pages()
    direct = copier.prepare(native.Copy.LOAD, pages, np.empty(0, np.int64))
    through = copier.prepare(native.Copy.FILL, pages, np.arange(len(pages)))
    assert direct.num_runs == CHUNKS * WITHIN * KV.heads
    assert through.num_runs == CHUNKS
    rank.engine.close()


def test_a_fill_goes_beside_the_scatter_before_it_and_waits_for_its_span_alone(
    fake: FakeGpu,
) -> None:
    rig = CudaRig(fake, rules=THROUGH, read_size=ReadSize(2, 2 * PAGE_BYTES))
    pages = table((0, 0, 1), (1, 0, 2))
    fills: Any = rig.cuda.read_buffer.fills
    waits = fake.count("cuStreamWaitEvent")
    mark = rig.engine.mark()
    for layer in ALL:
        rig.engine.load(pages, range(layer, layer + 1), mark)
    # The mark; the first fill for what the load has waited for; each scatter for its fill; and each
    # fill for what has read its span last.
    assert fake.count("cuStreamWaitEvent") - waits == 1 + 1 + LAYERS + LAYERS
    assert fills.pending
    fake.synchronize()
    assert np.array_equal(rig.hbm()[:, 1], rig.pages[0, :, 0])


def test_the_time_of_a_load_has_not_what_it_waited_for(fake: FakeGpu) -> None:
    """Else a load that waits for a long pass, and is filled in it, seems to take no time."""
    rig = CudaRig(fake, rules=THROUGH)
    rig.engine.measured()
    for _ in range(300):
        rig.compute(lambda: None)
    event = rig.engine.load(table((0, 0, 1)), ALL)
    rig.engine.wait(event)
    ((_, seconds),) = rig.engine.measured()
    assert 0 < seconds < 0.1  # in pieces of work that are a millisecond each


def test_without_a_rule_there_is_no_buffer_and_no_call_more(fake: FakeGpu) -> None:
    rig = CudaRig(fake, rules=RULES, read_size=None)
    assert not rig.cuda.read_buffer.size.num_spans
    rig = CudaRig(fake, rules=RULES)
    assert rig.cuda.read_buffer.size.num_spans
    mark = rig.engine.mark()
    waits = fake.count("cuStreamWaitEvent")
    rig.engine.load(table((0, 0, 1)), ALL, mark)
    assert fake.count("cuStreamWaitEvent") == waits + 1


def test_a_rule_brings_the_buffer_and_it_is_bounded(fake: FakeGpu) -> None:
    rig = CudaRig(fake, rules={**RULES, Copy.LOAD: (Rule(0, Method.BUFFER),)}, read_size=None)
    assert rig.cuda.read_buffer.size.num_spans
    assert rig.cuda.read_buffer.size == READ_SIZE
    assert READ_SIZE.num_bytes == 64 << 20


def test_where_hbm_has_no_room_loads_go_without_it(
    fake: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail("cuMemAlloc_v2", after=1)  # behind the write buffer
    rig = CudaRig(fake, rules=THROUGH)
    assert not rig.cuda.read_buffer.size.num_spans
    assert "of HBM are not free for the read buffer" in caplog.text
    before = fake.count(BATCH)
    rig.engine.wait(rig.engine.load(table((0, 0, 1)), ALL))
    assert fake.count(BATCH) == before + 1, "by DMA"


def test_pages_that_are_larger_than_a_span_go_by_dma(fake: FakeGpu) -> None:
    rig = CudaRig(fake, rules=THROUGH, read_size=ReadSize(3, 64))
    assert PAGE_BYTES > 64
    kernels = fake.count(KERNEL)
    rig.engine.wait(rig.engine.load(table((0, 0, 1)), ALL))
    assert fake.count(KERNEL) == kernels


def test_wrong_bytes_of_the_buffer_alone_are_found_when_it_is_made(fake: FakeGpu) -> None:
    """It is one of the ways that are tried."""
    batches, kernels = fake.count(BATCH), fake.count(KERNEL)
    CudaRig(fake, read_size=ReadSize(0, 0)).engine.close()
    without = fake.count(BATCH) - batches, fake.count(KERNEL) - kernels
    batches, kernels = fake.count(BATCH), fake.count(KERNEL)
    CudaRig(fake).engine.close()
    assert fake.count(BATCH) - batches > without[0]
    assert fake.count(KERNEL) - kernels >= without[1] + LAYERS


@pytest.mark.parametrize(
    ("layer", "first", "count", "span"),
    [(LAYERS, 0, 1, 0), (-1, 0, 1, 0), (0, 0, 1, 2), (0, 0, 1, -1), (0, 2, 1, 0), (0, 0, 3, 0),
     (0, -1, 1, 0), (0, 0, -1, 0)],
)  # fmt: skip
def test_what_does_not_exist_is_refused(
    fake: FakeGpu, layer: int, first: int, count: int, span: int
) -> None:
    rig, native = CudaRig(fake), native_module()
    copier, pages, rows = copier_of(rig.cuda), table((0, 0, 1), (1, 0, 2)), np.arange(2)
    scatter = copier.prepare(native.Copy.SCATTER, pages, rows)
    with pytest.raises(IndexError):
        copier.scatter(scatter, layer, first, count, span, 0, 1, 0)
    if (first, count) == (0, 1):
        fill = copier.prepare(native.Copy.FILL, pages, rows)
        with pytest.raises(IndexError):
            copier.fill(fill, layer, span, True, 0)
    for wrong in (native.Copy.FILL, native.Copy.SCATTER):
        with pytest.raises(IndexError, match="row 2 of 2"):
            copier.prepare(wrong, pages, np.array([0, 2]))
        batch = copier.prepare(wrong, pages, rows)
        with pytest.raises(ValueError, match="goes through the read buffer"):
            copier.by_dma(batch, 0, 1, True, 0)
        with pytest.raises(ValueError, match="goes through the read buffer"):
            copier.by_kernel(batch, 0, 1, 0, 0, 1, 0)
    assert BLOCKS > 2
