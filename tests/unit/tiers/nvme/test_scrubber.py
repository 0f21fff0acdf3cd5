# SPDX-License-Identifier: Apache-2.0
"""The scrubber finds rot before a request does, within its budget, and is in nobody's way.

It is long since budget, rot and races share one clock and one disk.

The store's turns and seconds are the test's here, and the disk does nothing before step().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest

from attnstore_lab.testing.devices import Effect, FailingDevice, Fault, MemoryDevice
from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.breaker import FAILURES_MAX, PAUSE_MIN_S
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.nvme_io import SCRUB_BURST_S
from attnstore_vllm.tiers.nvme.scrubber import LOOK_MAX
from attnstore_vllm.types import NVME, Key
from tests import helpers
from tests.helpers import CHUNK_TOKENS, RECORD_BYTES, Rig, found_slab

UNLIMITED = 1 << 40
IO_DEADLINE_S = 5.0
TURNS_MAX = 5000


@dataclass(slots=True)
class Scrubbed(Rig):
    """A rig without a thread: time passes, and the store works, when the test says so."""

    rate: int | None = UNLIMITED
    now: float = 0.0

    def __post_init__(self) -> None:
        self.pool = helpers.open_pool(self.dram_slots)
        self.store = open_store(
            self.pool,
            self.slab,
            self.device,
            io_depth=self.depth,
            io_deadline_ms=round(1000 * IO_DEADLINE_S),
            scrub_bytes_per_s=self.rate,
            clock=lambda: self.now,
            threaded=False,
        )

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.store.tick()
        raise AssertionError("the store did not get there")

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.store.tick()

    def close(self) -> None:
        self.pool.close()

    def inject(self, fault: Fault) -> None:
        assert isinstance(self.device, FailingDevice)
        self.device.inject(fault)

    @property
    def records(self) -> dict[int, Key]:
        """What NVMe has: record number to key."""
        return {
            c.at(NVME).slot: c.name.key for c in self.store.residency.index if c.at(NVME).slot >= 0
        }

    def count(self, event: str) -> int:
        return self.store.figures().counts.get(event, 0)


Cold = Callable[..., tuple[Scrubbed, MemoryDevice]]
"""The fixture open_cold."""


def sequence(conversation: int) -> SequenceKeys:
    return helpers.sequence_of(helpers.tokens_of(conversation, CHUNK_TOKENS))


def name(conversation: int) -> ChunkName:
    return helpers.name_of(sequence(conversation), 0)


def fill(rig: Scrubbed, conversations: Iterable[int]) -> None:
    for conversation in conversations:
        assert rig.put(name(conversation)) is not None
        rig.until_idle()


def medium(num_chunks: int, num_records: int) -> bytes:
    """A disk with conversation n in record n."""
    device, slab = MemoryDevice(helpers.slab_bytes(num_records)), helpers.new_slab(num_records)
    helpers.format_device(device, slab)
    rig = Scrubbed(device, slab, rate=None)
    fill(rig, range(num_chunks))
    rig.close()
    return bytes(device.image)


@pytest.fixture
def open_cold() -> Iterator[Cold]:
    """Opens stores in which conversation n is cold, in record n; the disk is held from then on."""
    opened: list[tuple[Scrubbed, MemoryDevice]] = []

    def open_cold(
        num_chunks: int = 4, num_records: int | None = None, rate: int | None = UNLIMITED
    ) -> tuple[Scrubbed, MemoryDevice]:
        image = medium(num_chunks, num_records or num_chunks)
        memory = helpers.held_device(image)
        memory.release()
        rig = Scrubbed(FailingDevice(memory), found_slab(image), rate=rate)
        opened.append((rig, memory))
        rig.until_idle()
        assert rig.records == {record: name(record).key for record in range(num_chunks)}
        memory.hold()
        return rig, memory

    yield open_cold
    for rig, memory in opened:
        memory.release()
        rig.until_idle()
        rig.tick()  # a scrub that was in flight
        rig.store.check_integrity()
        assert rig.store.residency.nvme.num_used == len(rig.records), "a slot stays taken"
        assert all(chunk.at(NVME).uses == 0 for chunk in rig.store.residency.index)
        rig.close()


def in_flight(rig: Scrubbed, memory: MemoryDevice) -> list[int]:
    """The records that whole-record reads in flight are of, oldest first."""
    records = {rig.slab.offset(record): record for record in range(rig.slab.records_max)}
    assert all(request.op is Op.READ for request in memory.pending)
    assert all(sum(map(len, request.buffers)) == RECORD_BYTES for request in memory.pending)
    return [records[request.offset] for request in memory.pending]


def scrub(rig: Scrubbed, memory: MemoryDevice) -> list[int]:
    """Let the scrubber read what it wants to read now: no record, or one."""
    rig.tick()
    records = in_flight(rig, memory)
    assert len(records) <= 1
    for _ in records:
        memory.step()
    rig.tick()
    return records


def visit(rig: Scrubbed, memory: MemoryDevice, times: int) -> list[int]:
    return [record for _ in range(times) for record in scrub(rig, memory)]


def write_back(rig: Scrubbed, memory: MemoryDevice) -> None:
    """Let all that is dirty be written, beside a scrub that stays in flight."""
    scrubbed = memory.pending[0]

    def all_is_written() -> bool:
        while len(memory.pending) > 1:
            memory.step(1)
        return rig.store.is_idle()

    rig.until(all_is_written)
    assert memory.pending == (scrubbed,)


# ---- what it finds ---------------------------------------------------------------------


def check_lost(rig: Scrubbed, memory: MemoryDevice, lost: int, event: str) -> None:
    """A round costs this record and no other; the chunk is a miss, and can be stored again."""
    others = rig.records
    del others[lost]
    memory.release()
    rig.tick(len(others) + 1)
    assert rig.records == others
    assert (rig.count(event), rig.count("scrubbed")) == (1, len(others))
    assert rig.count("corrupt") + rig.count("read_failed") == 1
    assert rig.store.residency.nvme.num_used == len(others), "its slot is free"
    assert rig.read(sequence(lost)) == []
    fill(rig, [lost])
    rig.tick(3 * len(others))
    assert rig.check_read(sequence(lost)) == 1
    assert rig.records.keys() == {*others, lost}
    assert rig.count(event) == 1


@pytest.mark.parametrize("record", [0, 2, 3])
@pytest.mark.parametrize("byte", [0, 12, 20, 40, 72, 130, 270, 4095, 4096, RECORD_BYTES - 1])
def test_rot_is_found_without_a_request(open_cold: Cold, record: int, byte: int) -> None:
    """In the header, or from byte 4096 on in the payload."""
    rig, memory = open_cold()
    memory.image[rig.slab.offset(record) + byte] ^= 0x20
    check_lost(rig, memory, record, "corrupt")


def test_a_whole_record_in_the_place_of_another_is_found(open_cold: Cold) -> None:
    rig, memory = open_cold()
    at, other = rig.slab.offset(2), rig.slab.offset(3)
    memory.image[at : at + RECORD_BYTES] = memory.image[other : other + RECORD_BYTES]
    check_lost(rig, memory, 2, "corrupt")


@pytest.mark.parametrize("effect", [Effect.FLIP, Effect.FAIL])
def test_a_read_that_goes_wrong_costs_that_chunk_alone(open_cold: Cold, effect: Effect) -> None:
    rig, memory = open_cold()
    rig.inject(Fault(effect=effect, op=Op.READ, nth=1, bit=8 * RECORD_BYTES - 7))
    check_lost(rig, memory, 1, "read_failed" if effect is Effect.FAIL else "corrupt")
    assert rig.store.gauges()["nvme_in_use", "reads"] == 1


def test_the_stores_own_thread_scrubs() -> None:
    image = medium(4, 4)
    memory = helpers.held_device(image)
    slab = found_slab(image)
    memory.image[slab.offset(2) + slab.header_bytes] ^= 1
    memory.release()
    store = open_store(helpers.open_pool(4), slab, memory, io_depth=4, scrub_bytes_per_s=UNLIMITED)
    helpers.wait_until(lambda: store.figures().counts.get("scrubbed", 0) >= 6, store)
    store.close()
    assert store.figures().counts["corrupt"] == 1
    assert {chunk.at(NVME).slot for chunk in store.residency.index} == {0, 1, 3}


def test_it_goes_round_the_file_and_starts_again(open_cold: Cold) -> None:
    rig, memory = open_cold(5, num_records=9)
    rig.store.drop([rig.chunk(name(2))])
    assert visit(rig, memory, 10) == [0, 1, 3, 4, 0, 1, 3, 4, 0, 1]
    memory.image[rig.slab.offset(1) + rig.slab.header_bytes] ^= 1  # rot that comes later
    assert visit(rig, memory, 7) == [3, 4, 0, 1, 3, 4, 0]
    assert rig.records.keys() == {0, 3, 4}


def test_records_that_are_far_apart_all_have_their_turn(open_cold: Cold) -> None:
    last = 2 * LOOK_MAX + 50
    rig, memory = open_cold(last + 1)
    rig.store.drop([rig.chunk(name(record)) for record in range(1, last)])
    assert visit(rig, memory, 12)[:4] == [0, last, 0, last]


def test_what_dram_has_as_well_is_left_alone(open_cold: Cold) -> None:
    """Its bytes are there, and are served; the record is read when they have gone."""
    rig, memory = open_cold(num_records=16)
    memory.release()
    assert rig.check_read(sequence(1)) == 1
    memory.hold()
    memory.image[rig.slab.offset(1) + rig.slab.header_bytes] ^= 1
    assert visit(rig, memory, 6) == [0, 2, 3, 0, 2, 3]
    assert rig.check_read(sequence(1)) == 1
    assert rig.count("corrupt") == 0
    memory.release()
    fill(rig, range(20, 20 + rig.dram_slots))
    rig.tick(16)
    assert rig.store.residency.index.get(name(1).key) is None
    assert rig.count("corrupt") == 1


# ---- when, and how much ----------------------------------------------------------------


@pytest.mark.parametrize("rate", [RECORD_BYTES // 4, RECORD_BYTES, 5 * RECORD_BYTES // 2])
def test_the_budget_holds_over_time_and_is_used(open_cold: Cold, rate: int) -> None:
    rig, memory = open_cold(8, rate=rate)
    num_bytes = 0
    for _ in range(3000):
        rig.now += 0.01
        num_bytes += RECORD_BYTES * len(scrub(rig, memory))
        assert num_bytes <= rate * (rig.now + SCRUB_BURST_S) + RECORD_BYTES
    assert num_bytes >= rate * rig.now - RECORD_BYTES


def test_an_idle_hour_is_not_saved_up(open_cold: Cold) -> None:
    rig, memory = open_cold(8, rate=2 * RECORD_BYTES)
    visit(rig, memory, 50)
    for _ in range(3):
        rig.now += 3600.0
        assert 2 * SCRUB_BURST_S <= len(visit(rig, memory, 50)) <= 2 * SCRUB_BURST_S + 1


def test_without_a_rate_nothing_is_read(open_cold: Cold) -> None:
    rig, memory = open_cold(rate=None)
    memory.image[rig.slab.offset(1) + rig.slab.header_bytes] ^= 1
    for _ in range(200):
        rig.now += 60.0
        assert scrub(rig, memory) == []
    assert rig.count("scrubbed") == rig.count("corrupt") == 0
    assert len(rig.records) == 4


def test_nothing_is_scrubbed_while_a_request_waits_for_the_disk(open_cold: Cold) -> None:
    rig, memory = open_cold()
    rig.store.find(Lookup(sequence(3)), 0, CHUNK_TOKENS)
    rig.tick(5)
    assert in_flight(rig, memory) == [3]
    memory.step()
    rig.tick()
    assert visit(rig, memory, 3) == [0, 1, 2]


def test_a_disk_that_fails_is_left_alone_until_it_works_again(open_cold: Cold) -> None:
    rig, memory = open_cold(FAILURES_MAX + 3)
    bad = range(rig.slab.offset(0), rig.slab.offset(FAILURES_MAX))
    rig.inject(Fault(effect=Effect.FAIL, op=Op.READ, offsets=bad))
    memory.release()
    rig.tick(50)
    left = set(range(FAILURES_MAX, FAILURES_MAX + 3))
    assert rig.records.keys() == left
    assert (rig.count("read_failed"), rig.count("scrubbed")) == (FAILURES_MAX, 0)
    rig.now += 2 * PAUSE_MIN_S
    rig.tick(10)
    assert rig.records.keys() == left
    assert rig.count("scrubbed") > len(left)


# ---- beside others ---------------------------------------------------------------------


@pytest.mark.parametrize("rot", [0, 1])
@pytest.mark.parametrize("ends_first", [0, 1])  # the scrub; the request's read
def test_what_is_wanted_while_it_is_scrubbed_is_served_right_or_not_at_all(
    open_cold: Cold, rot: int, ends_first: int
) -> None:
    rig, memory = open_cold()
    memory.image[rig.slab.offset(0) + rig.slab.header_bytes] ^= rot
    rig.tick()
    pieces = rig.store.find(Lookup(sequence(0)), 0, CHUNK_TOKENS)
    assert in_flight(rig, memory) == [0, 0]
    memory.step(ends_first)
    rig.tick()
    held = rig.store.hold_ready(pieces, sequence(0), CHUNK_TOKENS)
    assert len(held) == (ends_first == 1 and not rot), "held while the scrub goes on"
    memory.step()
    rig.tick()
    rig.store.release(piece.chunk for piece in held)
    assert memory.pending == ()
    assert rig.check_read(sequence(0)) == rig.store.residency.dram.num_used == 1 - rot
    assert (rig.count("corrupt") > 0, 0 in rig.records) == (rot > 0, rot == 0)


def test_the_slot_of_a_chunk_that_was_dropped_is_not_given_away_meanwhile(open_cold: Cold) -> None:
    rig, memory = open_cold()
    rig.tick()
    assert in_flight(rig, memory) == [0]
    rig.store.drop([rig.chunk(name(0))])
    for conversation in range(10, 15):
        rig.put(name(conversation))
    write_back(rig, memory)
    assert rig.records.keys() == {1, 2, 3}
    assert rig.store.residency.nvme.num_used == 4
    memory.release()
    rig.tick()
    assert rig.store.residency.nvme.num_used == 3
    fill(rig, [20])
    assert rig.records[0] == name(20).key
    assert rig.count("corrupt") == rig.count("read_failed") == 0


def test_a_record_is_not_evicted_while_it_is_scrubbed(open_cold: Cold) -> None:
    rig, memory = open_cold()
    rig.tick()
    for conversation in (10, 11):
        rig.put(name(conversation))
    write_back(rig, memory)
    keys = [name(conversation).key for conversation in (0, 11, 10, 3)]
    assert rig.records == dict(enumerate(keys))
    memory.release()
    rig.tick()
    fill(rig, [12])
    assert rig.records[0] == name(12).key, "it was the oldest, or this shows nothing"
    assert rig.count("corrupt") == 0


def test_a_reset_while_a_scrub_is_in_flight(open_cold: Cold) -> None:
    rig, memory = open_cold()
    rig.tick()
    (reset,) = rig.store.thread.reset()
    assert rig.records == {}
    while not reset.is_over:
        memory.step(1)
        rig.tick()
    rig.put(name(10))
    write_back(rig, memory)
    assert rig.records == {1: name(10).key}
    memory.release()
    rig.tick()
    assert rig.store.residency.nvme.num_used == 1
    assert rig.count("corrupt") == 0


def test_a_scrub_that_does_not_end_is_given_up(open_cold: Cold) -> None:
    rig, memory = open_cold()
    rig.tick()
    rig.now += 2 * IO_DEADLINE_S
    rig.tick(3)
    assert rig.count("device_late") == 1
    assert memory.pending == (), "it was cancelled, and the disk is left alone"
    assert rig.store.residency.nvme.num_used == len(rig.records)
    memory.release()
    rig.now += 2 * PAUSE_MIN_S
    rig.tick(10)
    assert rig.count("scrubbed") >= 3
    assert rig.check_read(sequence(3)) == 1
