# SPDX-License-Identifier: Apache-2.0
"""Fills a store for ever and says how far it came, until somebody kills it.

    python -m tests.crash.writer DIRECTORY NUM_RECORDS

Prints `created` when the pool exists, `joined` when all members have it, then n each time the
chunks 0..n are all on NVMe.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.io.aiofiles_device import AiofilesDevice
from attnstore_vllm.machine import SLAB_NAME, lock_directory
from attnstore_vllm.store.format import PAGE_BYTES, header_bytes
from attnstore_vllm.store.slab import open_slab
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.pool import SharedPool, pool_name
from tests.helpers import (
    CHUNK_TOKENS,
    NAMESPACE,
    name_of,
    payload_of,
    sequence_of,
    tokens_of,
    wait_until,
)

PAYLOAD_BYTES = 32 * PAGE_BYTES  # large, so that a kill finds writes half done
DRAM_SLOTS = 8
DEPTH = 4
BATCH = 3


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


def open_store(directory: Path, num_records: int, pool: SharedPool) -> Store:
    capacity = PAGE_BYTES + num_records * (header_bytes(CHUNK_TOKENS) + PAYLOAD_BYTES)
    path = directory / SLAB_NAME
    slab = open_slab(path, capacity, CHUNK_TOKENS, PAYLOAD_BYTES, NAMESPACE)
    return Store(pool, slab, AiofilesDevice(path, DEPTH), DEPTH)


def main(directory: Path, num_records: int) -> None:
    lock = lock_directory(directory)
    assert lock >= 0
    pools = open_pool(directory)
    worker = next(pools)
    print("created", flush=True)
    pool = next(pools)
    print("joined", flush=True)
    store = open_store(directory, num_records, pool)
    for n in itertools.count():
        chunk = store.begin_save(chunk_name(n))
        assert chunk is not None
        worker.slot(chunk.dram_slot)[:] = payload(n)
        store.finish_saves([chunk])
        if n % BATCH == BATCH - 1:
            wait_until(store.is_idle, store)
            print(n, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
