# SPDX-License-Identifier: Apache-2.0
"""The store over disks that fail: each fault costs chunks and is counted; none costs an answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator

import pytest

from attnstore_lab.testing.devices import Effect, FailingDevice, Fault, MemoryDevice, SlowDevice
from attnstore_vllm.index.chunk import State
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.breaker import FAILURES_MAX
from attnstore_vllm.types import NVME, Flow
from tests.helpers import (
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Rig,
    format_device,
    found_slab,
    lookup_of,
    name_of,
    new_slab,
    num_dirty,
    payload_of,
    sequence_of,
    slab_bytes,
    tokens_of,
)

NUM_RECORDS = 16
DRAM_SLOTS = 4
Open = Callable[..., "Faulty"]


class Faulty:
    """A store over a FailingDevice over memory."""

    def __init__(self, *faults: Fault, image: bytes | None = None) -> None:
        self.memory = MemoryDevice(slab_bytes(NUM_RECORDS))
        if image is None:
            slab = new_slab(NUM_RECORDS)
            format_device(self.memory, slab)
        else:
            self.memory.image[:] = image
            slab = found_slab(image)
        self.device = FailingDevice(self.memory, *faults)
        self.rig = Rig(self.device, slab, DRAM_SLOTS)
        self.memory.settle()
        self._fillers = itertools.count(800)

    @property
    def counts(self) -> dict[str, int]:
        return self.rig.store.figures().counts

    def put(self, conversation: int) -> None:
        self.rig.put(name_of(sequence_of(tokens_of(conversation, 16)), 0))
        self.memory.settle()

    def read(self, conversation: int) -> bytes | None:
        found = self.rig.read(sequence_of(tokens_of(conversation, 16)))
        return found[0][1] if found else None

    def put_on_nvme_only(self, conversation: int) -> int:
        """Returns the chunk's record."""
        self.put(conversation)
        chunk = self.rig.chunk(name_of(sequence_of(tokens_of(conversation, 16)), 0))
        for _ in range(DRAM_SLOTS):
            self.put(next(self._fillers))
        assert (chunk.dram.state, chunk.at(NVME).state) == (State.ABSENT, State.READY)
        return chunk.at(NVME).slot


def right(conversation: int) -> bytes:
    return payload_of(name_of(sequence_of(tokens_of(conversation, 16)), 0))


@pytest.fixture
def open_faulty() -> Iterator[Open]:
    opened: list[Faulty] = []

    def open_faulty(*faults: Fault, image: bytes | None = None) -> Faulty:
        opened.append(Faulty(*faults, image=image))
        return opened[-1]

    yield open_faulty
    for faulty in opened:
        faulty.rig.store.check_integrity()
        faulty.rig.close()


def check_goes_on(faulty: Faulty) -> None:
    """A chunk that comes after the fault is stored, evicted and read as ever."""
    faulty.put_on_nvme_only(50)
    assert faulty.read(50) == right(50)
    assert faulty.rig.store.residency.num_held() == 0


@pytest.mark.parametrize("byte", [0, 1, PAYLOAD_BYTES // 2, PAYLOAD_BYTES - 1])
def test_a_damaged_payload_is_a_miss(open_faulty: Open, byte: int) -> None:
    faulty = open_faulty()
    record = faulty.put_on_nvme_only(1)
    slab = faulty.rig.slab
    faulty.memory.image[slab.offset(record) + slab.header_bytes + byte] ^= 0x10
    assert faulty.read(1) is None
    assert faulty.counts["corrupt"] == 1
    assert faulty.read(1) is None, "a wrong record is not tried again"
    assert faulty.counts["corrupt"] == 1
    check_goes_on(faulty)


def test_the_log_says_where_a_record_was_damaged(
    open_faulty: Open, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = open_faulty(Fault(effect=Effect.FLIP, op=Op.READ, nth=0))
    record = faulty.put_on_nvme_only(1)
    assert faulty.read(1) is None
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert f"record {record} at byte {faulty.rig.slab.offset(record)}: " in line
    assert "prefilled again" in line


def test_a_bit_that_flips_on_the_way_is_a_miss(open_faulty: Open) -> None:
    faulty = open_faulty(Fault(effect=Effect.FLIP, op=Op.READ, nth=0, bit=12345))
    faulty.put_on_nvme_only(1)
    assert faulty.read(1) is None
    assert faulty.counts["corrupt"] == 1
    check_goes_on(faulty)


def test_a_misplaced_write_is_a_miss_for_both(open_faulty: Open) -> None:
    """It lands on the record of another chunk: neither may be served."""
    faulty = open_faulty()
    faulty.put_on_nvme_only(1)  # record 0
    fault = Fault(effect=Effect.MISPLACE, op=Op.WRITE, nth=0, shift_bytes=-5 * RECORD_BYTES)
    faulty.device.inject(fault)
    assert faulty.put_on_nvme_only(2) == 5
    assert faulty.read(1) is None
    assert faulty.read(2) is None
    assert faulty.counts["corrupt"] == 2
    check_goes_on(faulty)


def test_a_misplaced_write_is_not_found_by_the_next_start(open_faulty: Open) -> None:
    shift = 3 * RECORD_BYTES
    faulty = open_faulty(Fault(effect=Effect.MISPLACE, op=Op.WRITE, nth=0, shift_bytes=shift))
    faulty.put(1)
    again = open_faulty(image=bytes(faulty.memory.image))
    assert again.counts["recovered"] == 0
    assert again.read(1) is None


def test_a_lost_write_is_a_miss(open_faulty: Open) -> None:
    faulty = open_faulty(Fault(effect=Effect.LOSE, op=Op.WRITE, nth=0))
    faulty.put_on_nvme_only(1)
    assert faulty.read(1) is None
    assert faulty.counts["corrupt"] == 1
    check_goes_on(faulty)


def test_a_lost_write_over_an_old_record_does_not_bring_that_back(open_faulty: Open) -> None:
    """*Stale*: the old record is whole, and the index says that another chunk is there."""
    faulty = open_faulty()
    for number in range(NUM_RECORDS):
        faulty.put(number)
    faulty.device.inject(Fault(effect=Effect.LOSE, op=Op.WRITE))
    faulty.put_on_nvme_only(100)
    assert faulty.read(100) is None
    assert faulty.counts["corrupt"] == 1


def test_a_read_error_is_a_miss(open_faulty: Open) -> None:
    faulty = open_faulty()
    faulty.put_on_nvme_only(1)
    faulty.device.inject(Fault(effect=Effect.FAIL, op=Op.READ, nth=0))
    assert faulty.read(1) is None
    assert faulty.counts["read_failed"] == 1
    assert faulty.rig.store.figures().moved_bytes.get(Flow.PREFETCH, 0) == 0, "nothing was moved"
    check_goes_on(faulty)


def test_a_write_error_leaves_the_chunk_in_dram(open_faulty: Open) -> None:
    faulty = open_faulty(Fault(effect=Effect.FAIL, op=Op.WRITE, nth=0))
    faulty.put(1)
    assert faulty.counts["write_failed"] == 1
    assert faulty.rig.store.is_idle(), "it is not tried again and again"
    assert faulty.read(1) == right(1)
    faulty.rig.until_idle()
    assert faulty.counts["written"] == 1, "but when it was used"
    check_goes_on(faulty)


def test_a_disk_that_refuses_every_write(open_faulty: Open) -> None:
    faulty = open_faulty(Fault(effect=Effect.FAIL, op=Op.WRITE))
    for number in range(20):
        faulty.put(number)
        assert faulty.read(number) == right(number)
    assert faulty.counts["write_failed"] == FAILURES_MAX, "then it is left alone for a while"
    assert faulty.counts["device_out"] == 1
    assert faulty.rig.store.gauges()["nvme_in_use", "writes"] == 0
    assert faulty.rig.store.gauges()["nvme_in_use", "reads"] == 1
    assert num_dirty(faulty.rig.store.residency) <= 2 * DRAM_SLOTS, "what is not written piles up"
    assert faulty.rig.store.residency.nvme.num_used == 0
    assert not faulty.rig.store.reset(), "the old records may come back: that has to be said"
    assert faulty.read(19) is None


def test_what_waits_for_a_disk_that_is_left_alone_keeps_nobody_waiting(open_faulty: Open) -> None:
    faulty = open_faulty(Fault(effect=Effect.FAIL, op=Op.WRITE))
    store = faulty.rig.store
    for number in range(FAILURES_MAX):
        faulty.put(number)
    faulty.rig.until(lambda: not store.gauges()["nvme_in_use", "writes"])
    faulty.rig.put(name_of(sequence_of(tokens_of(30, 16)), 0))
    faulty.rig.until(store.is_idle)
    assert num_dirty(store.residency) == 1, "it is written when the disk works again"


def test_a_reset_whose_sync_fails_is_said_to_have_failed(open_faulty: Open) -> None:
    faulty = open_faulty(Fault(effect=Effect.FAIL, op=Op.SYNC, nth=0))
    assert not faulty.rig.store.reset()
    assert faulty.rig.store.reset()


def test_a_disk_that_refuses_every_read_at_the_start(open_faulty: Open) -> None:
    faulty = open_faulty()
    faulty.put(1)
    again = open_faulty(Fault(effect=Effect.FAIL, op=Op.READ), image=bytes(faulty.memory.image))
    assert "recovered" not in again.counts, "it is tried again later"
    again.put(2)
    assert again.read(2) == right(2)


def test_one_bad_place_costs_only_what_is_there(open_faulty: Open) -> None:
    faulty = open_faulty()
    bad = range(faulty.rig.slab.offset(2), faulty.rig.slab.offset(3))
    for number in range(4):
        faulty.put(number)
    again = open_faulty(
        Fault(effect=Effect.FAIL, op=Op.READ, offsets=bad), image=bytes(faulty.memory.image)
    )
    found = [again.read(number) for number in range(4)]
    assert found == [right(0), right(1), None, right(3)]


# ---- a device that dies ----------------------------------------------------------------


def until_out(faulty: Faulty) -> None:
    faulty.rig.until(lambda: faulty.rig.store.thread.is_out)


def test_dram_goes_on_when_the_device_dies(
    open_faulty: Open, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = open_faulty()
    faulty.put_on_nvme_only(1)
    rig = faulty.rig
    faulty.device.die()
    until_out(faulty)
    assert "NVMe tier stops" in caplog.text
    assert rig.store.find(lookup_of(tokens_of(1, 16)), 0, 16) == [], "a request would wait for it"
    for number in range(20, 60):
        rig.put(name_of(sequence_of(tokens_of(number, 16)), 0))
        assert faulty.read(number) == right(number)
        rig.store.check_integrity()
    assert rig.store.is_idle()
    assert num_dirty(rig.store.residency) == 0, "what will never be written piles up"


def test_what_dram_evicts_after_the_death_is_not_offered(open_faulty: Open) -> None:
    """Such a chunk was clean, but nobody can read it any more: no request may wait for it."""
    faulty = open_faulty()
    faulty.put(1)
    faulty.device.die()
    until_out(faulty)
    assert faulty.read(1) == right(1)
    for number in range(20, 20 + DRAM_SLOTS):
        faulty.rig.put(name_of(sequence_of(tokens_of(number, 16)), 0))
    assert faulty.rig.store.find(lookup_of(tokens_of(1, 16)), 0, 16) == []


def test_slots_that_a_dead_device_may_still_touch_are_not_given_away(open_faulty: Open) -> None:
    faulty = open_faulty()
    faulty.put_on_nvme_only(1)
    faulty.memory.hold()
    rig = faulty.rig
    (piece,) = rig.store.find(lookup_of(tokens_of(1, 16)), 0, 16)
    reading = piece.chunk.dram.slot
    faulty.device.die()
    until_out(faulty)
    for number in range(20, 30):
        chunk = rig.put(name_of(sequence_of(tokens_of(number, 16)), 0))
        assert chunk is not None
        assert chunk.dram.slot != reading
    faulty.memory.step()  # the disk was only late
    assert faulty.read(29) == right(29)


def test_a_reset_after_the_death_fails_at_once_and_drops_all(open_faulty: Open) -> None:
    faulty = open_faulty()
    faulty.put(1)
    faulty.device.die()
    until_out(faulty)
    assert not faulty.rig.store.reset()
    assert faulty.read(1) is None


def test_a_device_that_dies_during_recovery(open_faulty: Open) -> None:
    faulty = open_faulty()
    faulty.put(1)
    memory = MemoryDevice(faulty.memory.size_bytes, hold=True)
    memory.image[:] = faulty.memory.image
    failing = FailingDevice(memory)
    rig = Rig(failing, found_slab(memory.image), DRAM_SLOTS)
    failing.die()
    rig.until(lambda: rig.store.thread.is_out)
    rig.put(name_of(sequence_of(tokens_of(1, 16)), 0))
    assert rig.check_read(sequence_of(tokens_of(1, 16))) == 1
    rig.close()


def test_a_slow_disk_delays_nobody_who_does_not_wait(open_faulty: Open) -> None:
    memory = MemoryDevice(slab_bytes(NUM_RECORDS))
    slab = new_slab(NUM_RECORDS)
    format_device(memory, slab)
    slow = SlowDevice(memory, delay_s=0.05)
    rig = Rig(slow, slab, DRAM_SLOTS)
    rig.put_all(sequence_of(tokens_of(1, 16)))
    rig.until_idle()
    for number in range(20, 20 + DRAM_SLOTS):
        rig.put(name_of(sequence_of(tokens_of(number, 16)), 0))
    assert rig.read(sequence_of(tokens_of(1, 16)), wait=False) == []
    assert rig.check_read(sequence_of(tokens_of(1, 16))) == 1
    rig.close()
