# SPDX-License-Identifier: Apache-2.0
"""What the next start finds in a slab: whole records of this generation, and nothing else."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from attnstore_vllm.index.chunk import ChunkName, Dram, Nvme
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.index.residency import Residency
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.eviction import Lru, SlotLru
from attnstore_vllm.store.format import CHECKSUM_BYTES, Header, checksum
from attnstore_vllm.store.recovery import Found, scan, v2_pages
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.testing.devices import Effect, FailingDevice, Fault, MemoryDevice
from tests.helpers import (
    CHUNK_TOKENS,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    format_device,
    name_of,
    new_slab,
    payload_of,
    sequence_of,
    slab_bytes,
    tokens_of,
)

NUM_RECORDS = 8
CHECKSUM = b"c" * CHECKSUM_BYTES


def name(conversation: int, num_tokens: int = CHUNK_TOKENS) -> ChunkName:
    return name_of(sequence_of(tokens_of(conversation, num_tokens)), 0)


def empty() -> tuple[Slab, MemoryDevice]:
    slab, device = new_slab(NUM_RECORDS), MemoryDevice(slab_bytes(NUM_RECORDS))
    format_device(device, slab)
    return slab, device


def write(
    slab: Slab, device: MemoryDevice, record: int, chunk: ChunkName, sequence: int, version: int = 0
) -> bytes:
    """Put a whole record where the keeper would; returns the checksum of its payload."""
    payload = payload_of(chunk, version)
    digest = checksum(payload)
    header = Header(chunk, sequence, PAYLOAD_BYTES, digest)
    raw = header.encode(record, slab.superblock.generation, CHUNK_TOKENS) + payload
    device.image[slab.offset(record) : slab.offset(record) + RECORD_BYTES] = raw
    return digest


def found(slab: Slab, device: MemoryDevice, depth: int = 3) -> list[tuple[int, ChunkName, bytes]]:
    return scan(slab, device, depth).records


def test_an_empty_slab() -> None:
    slab, device = empty()
    assert scan(slab, device, 4) == Found([], 0)


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_records_come_oldest_first(depth: int) -> None:
    slab, device = empty()
    digests = {
        sequence: write(slab, device, record, name(sequence), sequence)
        for record, sequence in ((6, 2), (0, 9), (3, 5))
    }
    records = [(6, name(2), digests[2]), (3, name(5), digests[5]), (0, name(9), digests[9])]
    assert scan(slab, device, depth) == Found(records, 9)


@pytest.mark.parametrize("seed", range(4))
def test_completions_in_any_order(seed: int) -> None:
    slab, device = empty()
    for record in range(NUM_RECORDS):
        write(slab, device, record, name(record), sequence=record + 1)
    wanted = found(slab, device)
    device.hold()
    rng, results = random.Random(seed), list[Found]()
    scanner = threading.Thread(target=lambda: results.append(scan(slab, device, 3)))
    scanner.start()
    while scanner.is_alive():
        if device.pending:
            device.step(rng.randrange(len(device.pending)))
    scanner.join()
    assert results == [Found(wanted, NUM_RECORDS)]


def test_a_torn_misplaced_or_old_record_is_a_free_slot() -> None:
    slab, device = empty()
    for record in range(6):
        write(slab, device, record, name(record), sequence=record + 1)
    at = slab.offset(0)
    device.image[at + 300] ^= 1  # torn: within the header's page
    device.image[slab.offset(7) :] = device.image[slab.offset(1) : slab.offset(2)]  # misplaced
    other = replace(slab, superblock=replace(slab.superblock, generation=bytes(16)))
    write(other, device, 2, name(2), sequence=50)  # of before a reset
    device.image[slab.offset(3) : slab.offset(4)] = bytes(RECORD_BYTES)
    assert [record for record, _, _ in found(slab, device)] == [1, 4, 5]


def test_a_record_whose_key_is_not_that_of_its_tokens_is_not_trusted() -> None:
    slab, device = empty()
    good = name(1)
    write(slab, device, 0, replace(good, key=name(2).key), sequence=1)
    write(slab, device, 1, replace(good, parent=name(2).key), sequence=2)
    write(slab, device, 2, replace(good, extra=b"e" * 32), sequence=3)
    assert found(slab, device) == []


def test_a_record_that_cannot_be_read_is_a_free_slot() -> None:
    slab, device = empty()
    for record in range(4):
        write(slab, device, record, name(record), sequence=record + 1)
    bad = range(slab.offset(1), slab.offset(1) + 1)
    failing = FailingDevice(device, Fault(effect=Effect.FAIL, op=Op.READ, offsets=bad))
    assert [record for record, _, _ in scan(slab, failing, 2).records] == [0, 2, 3]


def test_of_two_records_of_a_chunk_the_newer_counts() -> None:
    """The older may be the one that was found damaged before the chunk was saved again."""
    slab, device = empty()
    write(slab, device, 0, name(1), sequence=1, version=1)
    write(slab, device, 1, name(2), sequence=2)
    newer = write(slab, device, 2, name(1), sequence=3, version=2)
    records = found(slab, device)
    assert [(record, chunk) for record, chunk, _ in records] == [(1, name(2)), (2, name(1))]
    assert records[1][2] == newer


# ---- entering them ---------------------------------------------------------------------


def residency(nvme_slots: int = 3) -> Residency:
    tiers = Residency(2, nvme_slots, Lru(), SlotLru(nvme_slots), chunk_tokens=CHUNK_TOKENS)
    tiers.open_nvme_slots(0, nvme_slots)
    return tiers


def adopt(tiers: Residency, records: list[tuple[int, ChunkName, bytes]]) -> int:
    """Enter them in one batch; returns how many are there then."""
    slots = np.array([slot for slot, _, _ in records], np.uint32)
    pages = memoryview(v2_pages(records, CHUNK_TOKENS))
    done = tiers.adopt_headers(pages, slots, len(pages) // len(records))
    tiers.finish_adoption()
    return done.entered - done.superseded


def test_adopted_chunks_are_on_nvme_in_their_slots() -> None:
    tiers = residency()
    assert adopt(tiers, [(2, name(1), CHECKSUM), (0, name(2), CHECKSUM)]) == 2
    assert (tiers.dram_used, tiers.nvme_used) == (0, 2)
    chunk = tiers.index.get(name(1).key)
    assert chunk is not None
    assert (chunk.dram, chunk.nvme, chunk.nvme_slot) == (Dram.ABSENT, Nvme.READY, 2)
    assert chunk.checksum == CHECKSUM
    assert chunk.usable
    tiers.check_integrity()


def test_capacity_holds_from_the_first_moment_and_the_oldest_goes_first() -> None:
    tiers = residency()
    adopt(tiers, [(2, name(1), CHECKSUM), (0, name(2), CHECKSUM), (1, name(3), CHECKSUM)])
    saved = tiers.begin_save(name(4))
    assert saved is not None
    tiers.finish_save(saved)
    assert tiers.begin_write_back() is saved
    assert (tiers.nvme_used, saved.nvme_slot) == (3, 2)
    assert tiers.index.get(name(1).key) is None
    tiers.check_integrity()


def test_what_is_known_already_is_left_out() -> None:
    tiers = residency()
    known = tiers.begin_save(name(1))
    assert known is not None
    assert adopt(tiers, [(0, name(1), CHECKSUM)]) == 0
    assert (known.nvme, tiers.nvme_used) == (Nvme.ABSENT, 0)
    tiers.check_integrity()


@pytest.mark.parametrize("tail_first", [True, False])
def test_a_tail_that_a_longer_record_supersedes_is_left_out(tail_first: bool) -> None:
    tiers = residency()
    records = [(1, name(2, 5), CHECKSUM), (2, name(2), CHECKSUM)]
    assert adopt(tiers, records if tail_first else records[::-1]) == 1
    assert tiers.index.get(name(2, 5).key) is None
    assert tiers.index.get(name(2).key) is not None
    assert tiers.nvme_used == 1
    tiers.check_integrity()


def test_a_tail_that_is_in_use_already_stays_beside_the_longer_record() -> None:
    tiers = residency()
    tail = tiers.begin_save(name(2, 5))
    assert tail is not None
    assert adopt(tiers, [(0, name(2), CHECKSUM)]) == 1
    tiers.finish_save(tail)
    assert tail.usable
    tiers.check_integrity()


def test_the_parent_of_a_chunk_need_not_be_there() -> None:
    sequence = sequence_of(tokens_of(1, 40))
    tiers = residency()
    adopt(tiers, [(0, name_of(sequence, 1), CHECKSUM)])
    assert tiers.index.match(sequence, 0, 40) == []
    assert [p.chunk.name.key for p in tiers.index.match(sequence, 16, 40)] == [sequence.key(1)]


def test_helpers_name_chunks_as_the_package_does() -> None:
    sequence = sequence_of(tokens_of(1, 40))
    chunk = name_of(sequence, 1)
    assert chunk == sequence.name(1, chunk.tenant)
    assert chunk.key == chunk_key(chunk.parent, chunk.extra, chunk.tokens)
