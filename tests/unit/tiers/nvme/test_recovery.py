# SPDX-License-Identifier: Apache-2.0
"""What the next start finds in a slab: whole records of this generation, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from attnstore_lab.testing.devices import Effect, FailingDevice, Fault, MemoryDevice
from attnstore_vllm.index.chunk import ChunkName, State
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.device import CHECKSUM_BYTES, Device, Op
from attnstore_vllm.tiers.nvme import recovery
from attnstore_vllm.tiers.nvme.format import Header
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import NVME
from tests.helpers import (
    CHUNK_TOKENS,
    NAMESPACE,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Rig,
    format_device,
    found_slab,
    lru,
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


def empty(num_records: int = NUM_RECORDS) -> tuple[Slab, MemoryDevice]:
    slab, device = new_slab(num_records), MemoryDevice(slab_bytes(num_records))
    format_device(device, slab)
    return slab, device


def write(
    slab: Slab, device: MemoryDevice, record: int, chunk: ChunkName, sequence: int, version: int = 0
) -> bytes:
    """Put a whole record where the writer would; returns the checksum of its payload."""
    payload = payload_of(chunk, version)
    digest = checksum(payload)
    header = Header(
        chunk, NAMESPACE, slab.own[0].generation, record, sequence, PAYLOAD_BYTES, digest, 0
    )
    raw = header.encode(CHUNK_TOKENS) + payload
    device.image[slab.offset(record) : slab.offset(record) + RECORD_BYTES] = raw
    return digest


@contextmanager
def next_start(image: bytearray, device: Device, depth: int = 3) -> Iterator[Rig]:
    """A store on what is there, once it has read all headers."""
    rig = Rig(device, found_slab(image), depth=depth)
    try:
        rig.until_idle()
        rig.store.check_integrity()
        yield rig
    finally:
        rig.close()


def slots(rig: Rig) -> dict[int, bytes]:
    """What it has found: record number to key."""
    return {chunk.at(NVME).slot: chunk.name.key for chunk in rig.store.residency.index}


def found(device: MemoryDevice) -> dict[int, bytes]:
    with next_start(device.image, device) as rig:
        return slots(rig)


def test_an_empty_slab() -> None:
    _, device = empty()
    assert found(device) == {}


@pytest.mark.parametrize("num_records", [1, 7, recovery.BATCH_HEADERS, 600])
def test_every_record_is_found_and_served(num_records: int) -> None:
    slab, device = empty(num_records)
    for record in range(num_records):
        write(slab, device, record, name(record), sequence=record + 1)
    with next_start(device.image, device) as rig:
        assert slots(rig) == {record: name(record).key for record in range(num_records)}
        assert rig.store.figures().counts["recovered"] == num_records
        assert rig.store.gauges()["recovery_records", ""] == num_records
        for record in (0, num_records - 1):
            assert rig.check_read(sequence_of(tokens_of(record, CHUNK_TOKENS))) == 1


@pytest.mark.parametrize("seed", range(4))
def test_completions_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "BATCH_HEADERS", 2)
    slab, device = empty(16)
    for record in range(16):
        write(slab, device, record, name(record), sequence=record + 1)
    image = bytearray(device.image)
    device.hold()
    rng = random.Random(seed)
    rig = Rig(device, found_slab(image))
    while not rig.store.is_idle():
        if device.pending:
            device.step(rng.randrange(len(device.pending)))
    assert len(slots(rig)) == 16
    device.release()
    for number in range(100, 103):  # the oldest records go first
        rig.put(name(number))
    rig.until_idle()
    assert set(slots(rig)) == set(range(16))
    assert [rig.store.residency.index.get(name(n).key) for n in range(3)] == [None] * 3
    rig.close()


def test_a_torn_misplaced_or_old_record_is_a_free_slot() -> None:
    slab, device = empty()
    for record in range(6):
        write(slab, device, record, name(record), sequence=record + 1)
    at = slab.offset(0)
    device.image[at + 300] ^= 1  # torn: within the header's page
    device.image[slab.offset(7) :] = device.image[slab.offset(1) : slab.offset(2)]  # misplaced
    other = replace(slab, own={0: replace(slab.own[0], generation=bytes(16))})
    write(other, device, 2, name(2), sequence=50)  # of before a reset
    device.image[slab.offset(3) : slab.offset(4)] = bytes(RECORD_BYTES)
    with next_start(device.image, device) as rig:
        assert set(slots(rig)) == {1, 4, 5}
        assert rig.store.figures().counts["corrupt"] == 2, "the torn and the misplaced one"


def test_a_record_whose_key_is_not_that_of_its_tokens_is_never_served() -> None:
    """Headers are not hashed one by one at start: it is noticed when the record is read."""
    slab, device = empty()
    good = name(1)
    forged = replace(good, tokens=name(2).tokens)
    write(slab, device, 0, forged, sequence=1)
    with next_start(device.image, device) as rig:
        assert set(slots(rig)) == {0}
        assert rig.read(sequence_of(tokens_of(1, CHUNK_TOKENS))) == []
        assert rig.store.figures().counts["corrupt"] == 1
        assert slots(rig) == {}


def test_a_record_that_cannot_be_read_is_a_free_slot() -> None:
    slab, device = empty()
    for record in range(4):
        write(slab, device, record, name(record), sequence=record + 1)
    bad = range(slab.offset(1), slab.offset(1) + 1)
    failing = FailingDevice(device, Fault(effect=Effect.FAIL, op=Op.READ, offsets=bad))
    with next_start(device.image, failing) as rig:
        assert set(slots(rig)) == {0, 2, 3}
        assert rig.store.figures().counts["read_failed"] == 1
        assert rig.store.gauges()["nvme_in_use", "reads"] == 1


def test_of_two_records_of_a_chunk_the_newer_counts() -> None:
    """The older may be the one that was found damaged before the chunk was saved again."""
    slab, device = empty()
    write(slab, device, 0, name(1), sequence=1, version=1)
    write(slab, device, 1, name(2), sequence=2)
    write(slab, device, 2, name(1), sequence=3, version=2)
    assert found(device) == {1: name(2).key, 2: name(1).key}


def test_what_is_saved_while_the_scan_goes_on_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "BATCH_HEADERS", 2)
    slab, device = empty()
    for record in range(NUM_RECORDS):
        write(slab, device, record, name(record), sequence=record + 1, version=7)
    image = bytearray(device.image)
    device.hold()
    rig = Rig(device, found_slab(image))
    rig.put(name(3))  # before its record is read
    device.release()
    rig.until_idle()
    ((_, payload),) = rig.read(sequence_of(tokens_of(3, CHUNK_TOKENS)))
    assert payload == payload_of(name(3))
    assert len(slots(rig)) == NUM_RECORDS
    rig.store.check_integrity()
    rig.close()


def test_a_reset_while_the_scan_goes_on_finds_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "BATCH_HEADERS", 1)
    slab, device = empty()
    for record in range(NUM_RECORDS):
        write(slab, device, record, name(record), sequence=record + 1)
    image = bytearray(device.image)
    device.hold()
    rig = Rig(device, found_slab(image))
    rig.until(lambda: len(device.pending) > 0)
    device.step()
    device.settle()
    assert len(slots(rig)) == 1
    (reset,) = rig.store.thread.reset()
    device.release()
    rig.until(lambda: reset.is_over)
    rig.until_idle()
    assert slots(rig) == {}
    rig.store.check_integrity()
    rig.close()
    assert found(device) == {}


# ---- entering them ---------------------------------------------------------------------


def residency(nvme_slots: int = 3) -> Residency:
    tiers = Residency(2, nvme_slots, lru, chunk_tokens=CHUNK_TOKENS)
    tiers.nvme.open(0, nvme_slots)
    return tiers


def adopt(tiers: Residency, records: list[tuple[int, ChunkName, bytes]]) -> int:
    """Enter them in one batch; returns how many are there then."""
    numbers = np.array([slot for slot, _, _ in records], np.uint32)
    pages = b"".join(
        Header(chunk, NAMESPACE, bytes(16), slot, i + 1, PAYLOAD_BYTES, digest, 0).encode(
            CHUNK_TOKENS
        )
        for i, (slot, chunk, digest) in enumerate(records)
    )
    done = tiers.nvme.adopt(memoryview(pages), numbers, len(pages) // len(records))
    tiers.nvme.all_adopted(tiers.nvme.adopted(), tiers.now)
    return done.entered - done.superseded


def test_adopted_chunks_are_on_nvme_in_their_slots() -> None:
    tiers = residency()
    assert adopt(tiers, [(2, name(1), CHECKSUM), (0, name(2), CHECKSUM)]) == 2
    assert (tiers.dram.num_used, tiers.nvme.num_used) == (0, 2)
    chunk = tiers.index.get(name(1).key)
    assert chunk is not None
    assert (chunk.dram.state, chunk.at(NVME).state, chunk.at(NVME).slot) == (
        State.ABSENT,
        State.READY,
        2,
    )
    assert chunk.at(NVME).checksum == CHECKSUM
    assert chunk.usable
    tiers.check_integrity()


def test_what_goes_while_the_order_is_worked_out_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread drops an adopted chunk just then."""
    tiers = residency()
    adopt(tiers, [(2, name(1), CHECKSUM), (0, name(2), CHECKSUM)])
    states = tiers.nvme.states().copy()
    chunk = tiers.index.get(name(1).key)
    assert chunk is not None
    tiers.drop(chunk)
    monkeypatch.setattr(tiers.nvme, "states", lambda: states)
    order = tiers.nvme.adopted()
    monkeypatch.undo()
    tiers.nvme.all_adopted(order, tiers.now)
    assert tiers.nvme.num_used == 1
    tiers.check_integrity()


def test_capacity_holds_from_the_first_moment_and_the_oldest_goes_first() -> None:
    tiers = residency()
    adopt(tiers, [(2, name(1), CHECKSUM), (0, name(2), CHECKSUM), (1, name(3), CHECKSUM)])
    saved = tiers.begin_save(name(4))
    assert saved is not None
    tiers.finish_save(saved)
    assert tiers.begin_store(tiers.nvme) is saved
    assert (tiers.nvme.num_used, saved.at(NVME).slot) == (3, 2)
    assert tiers.index.get(name(1).key) is None
    tiers.check_integrity()


def test_what_is_known_already_is_left_out() -> None:
    tiers = residency()
    known = tiers.begin_save(name(1))
    assert known is not None
    assert adopt(tiers, [(0, name(1), CHECKSUM)]) == 0
    assert (known.at(NVME).state, tiers.nvme.num_used) == (State.ABSENT, 0)
    tiers.check_integrity()


@pytest.mark.parametrize("tail_first", [True, False])
def test_a_tail_that_a_longer_record_supersedes_is_left_out(tail_first: bool) -> None:
    tiers = residency()
    records = [(1, name(2, 5), CHECKSUM), (2, name(2), CHECKSUM)]
    assert adopt(tiers, records if tail_first else records[::-1]) == 1
    assert tiers.index.get(name(2, 5).key) is None
    assert tiers.index.get(name(2).key) is not None
    assert tiers.nvme.num_used == 1
    tiers.check_integrity()


@pytest.mark.parametrize("lengths", [(8, 12, 16), (16, 12, 8), (12, 8, 16)])
def test_states_within_one_chunk_are_all_found(lengths: tuple[int, ...]) -> None:
    """Each is of use at its own length, and is one of those still when it is written again."""
    _, device = empty()
    with next_start(device.image, device) as rig:
        for num_tokens in lengths:
            state = rig.store.begin_save(name(1, num_tokens), is_alone=True)
            assert state is not None
            rig.store.finish_saves([state])
        rig.put(name(2, 12))
        rig.until_idle()
    after = MemoryDevice(len(device.image))
    after.image[:] = device.image
    with next_start(after.image, after) as rig:
        index = rig.store.residency.index
        assert [n for n in lengths if index.get(name(1, n).key) is None] == []
        assert all(rig.chunk(name(1, n)).is_alone for n in lengths)
        assert not rig.chunk(name(2, 12)).is_alone


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
