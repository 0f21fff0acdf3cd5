# SPDX-License-Identifier: Apache-2.0
"""The store over a device in memory: save, write back, evict, prefetch, load; reset; restart.

`settle()` lets the store's own thread do all it can, so these tests are the same every time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from attnstore_vllm.index.chunk import Dram, Nvme
from attnstore_vllm.io.device import Op
from attnstore_vllm.store import store as store_module
from attnstore_vllm.store.format import PAGE_BYTES
from attnstore_vllm.testing.devices import MemoryDevice, SlowDevice
from attnstore_vllm.types import Flow, Tier
from tests.helpers import (
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Rig,
    format_device,
    found_slab,
    memory_rig,
    name_of,
    names_of,
    new_slab,
    payload_of,
    sequence_of,
    slab_bytes,
    tokens_of,
)

Rigs = Callable[..., tuple[Rig, MemoryDevice]]


@pytest.fixture
def open_rig() -> Iterator[Rigs]:
    """Opens stores over new memory, or over the `image` that an earlier one left."""
    rigs: list[Rig] = []

    def open_rig(
        num_records: int = 16, dram_slots: int = 8, image: bytes | None = None
    ) -> tuple[Rig, MemoryDevice]:
        if image is None:
            rig = memory_rig(num_records, dram_slots)
        else:
            device = MemoryDevice(len(image))
            device.image[:] = image
            rig = Rig(device, found_slab(image), dram_slots)
        rigs.append(rig)
        assert isinstance(rig.device, MemoryDevice)
        rig.device.settle()
        return rig, rig.device

    yield open_rig
    for rig in rigs:
        if rig.is_open:
            assert isinstance(rig.device, MemoryDevice)
            rig.device.release()
            rig.device.settle()
            rig.store.residency.check_integrity()
            assert rig.store.residency.num_held() == 0
        rig.close()


def conversation(number: int, num_tokens: int = 40) -> list[int]:
    return tokens_of(number, num_tokens)


def push_out_of_dram(rig: Rig, device: MemoryDevice, count: int) -> None:
    for number in range(count):
        rig.put(name_of(sequence_of(conversation(700 + number, 16)), 0))
        device.settle()


def nvme_only(rig: Rig, device: MemoryDevice) -> list[int]:
    """A conversation of 3 chunks that is on NVMe and not in DRAM."""
    tokens = conversation(1)
    rig.put_all(sequence_of(tokens))
    device.settle()
    push_out_of_dram(rig, device, rig.dram_slots)
    for name in names_of(sequence_of(tokens)):
        chunk = rig.chunk(name)
        assert (chunk.dram, chunk.nvme) == (Dram.ABSENT, Nvme.READY)
    return tokens


# ---- the way up and down ---------------------------------------------------------------


def test_what_is_saved_is_read_from_dram(open_rig: Rigs) -> None:
    rig, device = open_rig()
    device.hold()  # no I/O is needed
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    assert rig.check_read(sequence) == 3
    assert rig.store.tiers(rig.store.find(sequence, 0, 40)) == {Tier.DRAM: 40, Tier.NVME: 0}


def test_written_back_evicted_prefetched_equal(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    assert rig.store.is_idle()
    sequence = sequence_of(tokens)
    pieces = rig.store.find(sequence, 0, 40)
    device.settle()
    assert rig.store.tiers(pieces) == {Tier.DRAM: 0, Tier.NVME: 40}
    assert rig.check_read(sequence) == 3
    # Loaded once: a second load of the same bytes comes from DRAM.
    assert rig.store.tiers(pieces) == {Tier.DRAM: 40, Tier.NVME: 0}
    assert rig.store.moved_bytes()[Flow.PREFETCH] == 3 * PAYLOAD_BYTES
    assert rig.store.moved_bytes()[Flow.WRITE_BACK] == 11 * RECORD_BYTES


def test_a_find_from_the_middle_prefetches_only_what_is_asked_for(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    rig.store.find(sequence_of(tokens), 16, 32)
    device.settle()
    places = [rig.chunk(name).dram for name in names_of(sequence_of(tokens))]
    assert places == [Dram.ABSENT, Dram.READY, Dram.ABSENT]


def test_reads_come_nearest_first(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    rig.store.find(sequence_of(tokens), 0, 40)
    names = names_of(sequence_of(tokens))
    wanted = [rig.slab.payload_offset(rig.chunk(name).nvme_slot) for name in names]
    assert [request.offset for request in device.pending] == wanted
    device.step()
    device.settle()
    assert rig.store.hold_ready([]) == []
    held = rig.store.hold_ready(rig.store.find(sequence_of(tokens), 0, 40))
    assert [piece.chunk.name for piece in held] == names[:1]
    rig.store.release(piece.chunk for piece in held)


def test_a_read_that_ends_out_of_order_is_not_offered_before_its_prefix(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    pieces = rig.store.find(sequence_of(tokens), 0, 40)
    device.step(1)
    device.settle()
    assert rig.store.hold_ready(pieces) == []
    assert pieces[1].chunk.dram is Dram.READY


def test_reads_in_flight_are_limited_by_the_depth(open_rig: Rigs) -> None:
    rig, device = open_rig(num_records=32, dram_slots=16)
    tokens = conversation(1, 96)
    rig.put_all(sequence_of(tokens))
    device.settle()
    push_out_of_dram(rig, device, 16)
    device.hold()
    rig.store.find(sequence_of(tokens), 0, 96)
    assert len(device.pending) == rig.depth
    device.step()
    device.settle()
    assert len(device.pending) == rig.depth
    device.release()
    device.settle()
    assert rig.check_read(sequence_of(tokens)) == 6


def test_at_most_half_of_the_depth_writes_and_reads_go_first(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    rig.put_all(sequence_of(conversation(2, 80)))
    device.settle()
    assert [request.op for request in device.pending] == [Op.WRITE] * (rig.depth // 2)
    rig.store.find(sequence_of(tokens), 0, 40)
    device.settle()
    assert [request.op for request in device.pending].count(Op.READ) == 3
    for _ in range(rig.depth // 2):
        device.step()
    device.settle()
    assert Op.WRITE not in [request.op for request in device.pending], "a write before the reads"


def test_a_save_without_room_is_dropped(open_rig: Rigs) -> None:
    rig, _ = open_rig(dram_slots=2)
    sequence = sequence_of(conversation(1))
    saving = [rig.store.begin_save(name) for name in names_of(sequence)]
    assert saving[2] is None
    assert rig.store.counts()["dropped"] == 1
    rig.store.finish_saves(chunk for chunk in saving if chunk is not None)


def test_room_for_a_read_that_comes_late_is_used(open_rig: Rigs) -> None:
    rig, device = open_rig(dram_slots=2)
    tokens = conversation(1, 16)
    rig.put_all(sequence_of(tokens))
    device.settle()
    push_out_of_dram(rig, device, 2)
    pieces = rig.store.find(sequence_of(conversation(700, 16)), 0, 16)
    pieces += rig.store.find(sequence_of(conversation(701, 16)), 0, 16)
    held = rig.store.hold_ready(pieces)
    assert len(held) == 2
    rig.store.find(sequence_of(tokens), 0, 16)
    device.settle()
    assert rig.chunk(name_of(sequence_of(tokens), 0)).dram is Dram.ABSENT
    rig.store.loaded(piece.chunk for piece in held)
    device.settle()
    assert rig.check_read(sequence_of(tokens)) == 1


def test_salts_are_worlds_of_their_own(open_rig: Rigs) -> None:
    rig, _ = open_rig()
    tokens = conversation(1, 16)
    for salt in (None, "a", "b"):
        name = name_of(sequence_of(tokens, salt), 0, salt)
        assert rig.put(name) is not None
    for salt in (None, "a", "b"):
        ((name, payload),) = rig.read(sequence_of(tokens, salt))
        assert payload == payload_of(name_of(sequence_of(tokens, salt), 0, salt))
        assert name.tenant == name_of(sequence_of(tokens, salt), 0, salt).tenant
    assert rig.read(sequence_of(tokens, "c")) == []


def test_held_bytes_are_counted_by_tier(open_rig: Rigs) -> None:
    rig, device = open_rig()
    rig.put_all(sequence_of(conversation(1)))
    device.settle()
    assert rig.store.held_bytes() == {Tier.DRAM: 3 * PAYLOAD_BYTES, Tier.NVME: 3 * RECORD_BYTES}


# ---- restart ---------------------------------------------------------------------------


def test_a_restart_finds_what_was_written_back(open_rig: Rigs) -> None:
    rig, device = open_rig()
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    rig.close()  # writes back what is dirty
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.counts()["recovered"] == 3
    assert again.check_read(sequence) == 3
    third, _ = open_rig(image=bytes(device.image))
    assert third.check_read(sequence) == 3


def test_records_written_after_a_restart_are_newer(open_rig: Rigs) -> None:
    rig, device = open_rig(num_records=3)
    for number in (1, 2, 3):
        rig.put_all(sequence_of(conversation(number, 16)))
        device.settle()
    again, device = open_rig(image=bytes(device.image))
    again.put_all(sequence_of(conversation(4, 16)))  # takes the place of the oldest
    device.settle()
    third, _ = open_rig(image=bytes(device.image))
    found = [third.check_read(sequence_of(conversation(number, 16))) for number in range(1, 5)]
    assert found == [0, 1, 1, 1]
    last, device = open_rig(image=bytes(device.image))
    last.put_all(sequence_of(conversation(5, 16)))
    device.settle()
    assert not last.store.find(sequence_of(conversation(2, 16)), 0, 16), "2 was the oldest then"


def test_what_is_saved_while_recovery_runs_is_kept(open_rig: Rigs) -> None:
    rig, device = open_rig()
    rig.put_all(sequence_of(conversation(1)))
    rig.close()
    device = held_device(bytes(device.image))
    again = Rig(device, found_slab(device.image))
    again.put_all(sequence_of(conversation(1, 16)))  # known to the disk too
    again.put_all(sequence_of(conversation(2)))
    assert all(request.op is Op.READ for request in device.pending), "a write during recovery"
    device.release()
    device.settle()
    assert again.check_read(sequence_of(conversation(1))) == 3
    assert again.check_read(sequence_of(conversation(2))) == 3
    again.store.residency.check_integrity()
    again.close()


# ---- reset -----------------------------------------------------------------------------


def held_device(image: bytes) -> MemoryDevice:
    device = MemoryDevice(len(image), hold=True)
    device.image[:] = image
    return device


def test_a_reset_drops_all_also_for_the_next_start(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    assert rig.store.reset()
    assert rig.read(sequence_of(tokens)) == []
    assert rig.store.held_bytes() == {Tier.DRAM: 0, Tier.NVME: 0}
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.counts()["recovered"] == 0
    assert again.read(sequence_of(tokens)) == []


def test_after_a_reset_the_store_works_but_leaves_nothing_behind(open_rig: Rigs) -> None:
    """What comes after may be of weights that no file has: good for this process only."""
    rig, device = open_rig()
    assert rig.store.reset()
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    device.settle()
    push_out_of_dram(rig, device, rig.dram_slots)
    assert rig.check_read(sequence) == 3
    again, _ = open_rig(image=bytes(device.image))
    assert again.read(sequence) == []


def test_a_reset_is_on_the_medium_before_it_is_reported(open_rig: Rigs) -> None:
    """Else a power loss would bring the old records back."""
    rig, device = open_rig()
    before = bytes(device.image[:PAGE_BYTES])
    device.hold()
    done: list[bool] = []
    resetter = threading.Thread(target=lambda: done.append(rig.store.reset()))
    resetter.start()
    ops: list[Op] = []
    while not done:
        if device.pending:
            assert not done
            ops.append(device.pending[0].op)
            device.step()
    resetter.join()
    assert done == [True]
    assert ops == [Op.WRITE, Op.SYNC]
    assert bytes(device.image[:PAGE_BYTES]) != before


def test_a_reset_during_saves_loads_reads_and_writes(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    loaded = rig.store.hold_ready(rig.store.find(sequence_of(conversation(700, 16)), 0, 16))
    loaded += rig.store.hold_ready(rig.store.find(sequence_of(conversation(707, 16)), 0, 16))
    assert loaded
    saving = rig.store.begin_save(name_of(sequence_of(conversation(2)), 0))
    assert saving is not None
    device.hold()
    rig.put(name_of(sequence_of(conversation(3)), 0))
    device.settle()
    rig.store.find(sequence_of(tokens), 0, 40)
    assert {request.op for request in device.pending} == {Op.READ, Op.WRITE}
    resetter = threading.Thread(target=rig.store.reset)
    resetter.start()
    rig.until(lambda: len(rig.store.residency.index) == 0)
    slots = {piece.chunk.dram_slot for piece in loaded} | {saving.dram_slot}
    later = rig.store.begin_save(name_of(sequence_of(conversation(4)), 0))
    assert later is None or later.dram_slot not in slots, "a slot in use was given away"
    device.release()
    resetter.join()
    rig.store.loaded(piece.chunk for piece in loaded)
    rig.store.finish_saves([saving] + ([later] if later else []))
    device.settle()
    for stale in (tokens, conversation(2), conversation(3), conversation(700, 16)):
        assert rig.read(sequence_of(stale)) == []
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.counts()["recovered"] == 0


def test_a_reset_while_recovery_runs_drops_what_recovery_finds(open_rig: Rigs) -> None:
    rig, device = open_rig()
    rig.put_all(sequence_of(conversation(1)))
    rig.close()
    device = held_device(bytes(device.image))
    again = Rig(device, found_slab(device.image))
    resetter = threading.Thread(target=again.store.reset)
    with again.store._lock:  # so that the reset is asked for before recovery ends
        resetter.start()
    again.until(lambda: again.store._keeper._reset_asked == 1)
    device.release()
    resetter.join()
    device.settle()
    assert again.read(sequence_of(conversation(1))) == [], "records of before the reset came back"
    again.close()


def test_two_resets(open_rig: Rigs) -> None:
    rig, _ = open_rig()
    assert rig.store.reset()
    rig.put_all(sequence_of(conversation(1)))
    assert rig.store.reset()
    assert rig.read(sequence_of(conversation(1))) == []


# ---- deadlines -------------------------------------------------------------------------


def test_a_reset_of_a_hanging_device_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RESET_DEADLINE_S", 0.2)
    slab = new_slab(4)
    memory = MemoryDevice(slab_bytes(4))
    format_device(memory, slab)
    slow = SlowDevice(memory)
    rig = Rig(slow, slab)
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    slow.hang()
    started = time.monotonic()
    assert not rig.store.reset()
    assert time.monotonic() - started < 3
    assert rig.read(sequence, wait=False) == [], "in this process the reset holds all the same"
    rig.put_all(sequence_of(conversation(2)))
    assert rig.check_read(sequence_of(conversation(2))) == 3, "DRAM goes on"
    slow.release()
    memory.settle()
    assert Rig(memory, replace(found_slab(memory.image), fresh=True)).slab.superblock != (
        slab.superblock
    )
    rig.close()


@pytest.mark.parametrize("progress", [False, True])
def test_closing_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
    """Also where each write ends in time, but there are too many of them."""
    monkeypatch.setattr(store_module, "CLOSE_DEADLINE_S", 0.3)
    slab = new_slab(64)
    slow = SlowDevice(MemoryDevice(slab_bytes(64)), delay_s=0.03)
    rig = Rig(slow, slab, dram_slots=64, depth=2)
    if not progress:
        slow.hang()
    rig.put_all(sequence_of(conversation(1, 64 * 16)))
    started = time.monotonic()
    rig.close()
    assert time.monotonic() - started < 1.2
