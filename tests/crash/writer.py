# SPDX-License-Identifier: Apache-2.0
"""Fills a store for ever and says how far it came, until somebody kills it.

    python -m tests.crash.writer DIRECTORY DEVICE NUM_RECORDS FIRST

Prints `created` when the pool exists, `joined` when all members have it, then, again and again,
the number of a chunk that is on NVMe now. It never pauses, so that a kill finds writes half done.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

from attnstore_lab.testing.small_store import SMALL
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.io.choose import DeviceKind, open_device
from attnstore_vllm.preflight import SLAB_NAME, lock_directory
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.transfer.pool import SharedPool, pool_name
from attnstore_vllm.types import NVME
from tests.helpers import (
    CHUNK_TOKENS,
    SHAPE,
    capacity_for,
    name_of,
    payload_of,
    sequence_of,
    tokens_of,
)

PAYLOAD_BYTES = 32 * PAGE_BYTES
DRAM_SLOTS = 8
DEPTH = 4  # so two writes are in flight
AHEAD = 5
"""Chunks that are in DRAM only; fewer than there are slots, so that none is lost."""


def sequence(n: int) -> SequenceKeys:
    return sequence_of(tokens_of(n, CHUNK_TOKENS))


def chunk_name(n: int) -> ChunkName:
    return name_of(sequence(n), 0)


def payload(n: int) -> bytes:
    return payload_of(chunk_name(n), num_bytes=PAYLOAD_BYTES)


def region_name(directory: Path) -> str:
    """As for a user who has chosen an engine_id: the same at each start."""
    return pool_name("crash-test", directory)


def open_pool(directory: Path) -> Iterator[SharedPool]:
    """The members join one after the other, as those of a rank and of the scheduler side do."""
    for member in (0, 1):
        yield SharedPool(
            region_name(directory), DRAM_SLOTS, PAYLOAD_BYTES, num_ranks=1, member=member
        )


def open_store(directory: Path, kind: DeviceKind, num_records: int, pool: SharedPool) -> Store:
    shape = replace(SHAPE, payload_bytes=PAYLOAD_BYTES)
    path = directory / SLAB_NAME
    slab = open_slab(path, capacity_for(num_records, shape.record_bytes), shape)
    device, _ = open_device(path, DEPTH, kind)
    return Store(pool, slab, device, replace(SMALL, io_depth=DEPTH), EngineFacts())


def main(directory: Path, kind: DeviceKind, num_records: int, first: int) -> None:
    lock = lock_directory(directory)
    assert lock >= 0
    pools = open_pool(directory)
    worker = next(pools)
    print("created", flush=True)
    pool = next(pools)
    print("joined", flush=True)
    store = open_store(directory, kind, num_records, pool)
    begun: dict[int, Chunk] = {}
    for n in itertools.count(first):
        chunk = store.begin_save(chunk_name(n))
        assert chunk is not None
        worker.slot(chunk.dram.slot)[:] = payload(n)
        store.finish_saves([chunk])
        begun[n] = chunk
        while len(store.residency.nvme.waiting) > AHEAD:
            store.wait_for_any((), 0.0002)
        for number, saved in list(begun.items()):  # written in any order, or gone unwritten
            if saved.at(NVME).state is State.READY:
                print(number, flush=True)
            if saved.dropped or saved.at(NVME).state is State.READY:
                del begun[number]


if __name__ == "__main__":
    main(Path(sys.argv[1]), cast(DeviceKind, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
