# SPDX-License-Identifier: Apache-2.0
"""A reset drops every tier, whatever is in flight, for this process and the next; and deadlines."""

from __future__ import annotations

import threading
import time

import pytest

from attnstore_lab.testing.devices import MemoryDevice, SlowDevice
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.io.device import Op
from attnstore_vllm.store import store as store_module
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES
from attnstore_vllm.types import DRAM, NVME
from tests.helpers import (
    SEGMENT_AT,
    Rig,
    Rigs,
    conversation,
    format_device,
    found_slab,
    held_device,
    lookup_of,
    name_of,
    new_slab,
    nvme_only,
    push_out_of_dram,
    sequence_of,
    slab_bytes,
)


def hold(rig: Rig, tokens: list[int]) -> list[Piece]:
    sequence, stop = sequence_of(tokens), len(tokens)
    return rig.store.hold_ready(rig.store.find(Lookup(sequence), 0, stop), sequence, stop)


def test_a_reset_drops_all_also_for_the_next_start(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    assert rig.store.reset()
    assert rig.read(sequence_of(tokens)) == []
    assert rig.store.gauges()["held_bytes", DRAM] == 0
    assert rig.store.gauges()["held_bytes", NVME] == 0
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0
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
    before = bytes(device.image[SEGMENT_AT : SEGMENT_AT + PAGE_BYTES])
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
    assert bytes(device.image[SEGMENT_AT : SEGMENT_AT + PAGE_BYTES]) != before


def test_a_reset_during_saves_loads_reads_and_writes(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    loaded = hold(rig, conversation(700, 16))
    loaded += hold(rig, conversation(707, 16))
    assert loaded
    saving = rig.store.begin_save(name_of(sequence_of(conversation(2)), 0))
    assert saving is not None
    device.hold()
    rig.put(name_of(sequence_of(conversation(3)), 0))
    device.settle()
    rig.store.find(lookup_of(tokens), 0, 40)
    assert {request.op for request in device.pending} == {Op.READ, Op.WRITE}
    resetter = threading.Thread(target=rig.store.reset)
    resetter.start()
    rig.until(lambda: len(rig.store.residency.index) == 0)
    slots = {piece.chunk.dram.slot for piece in loaded} | {saving.dram.slot}
    later = rig.store.begin_save(name_of(sequence_of(conversation(4)), 0))
    assert later is None or later.dram.slot not in slots, "a slot in use was given away"
    device.release()
    resetter.join()
    rig.store.loaded(piece.chunk for piece in loaded)
    rig.store.finish_saves([saving] + ([later] if later else []))
    device.settle()
    for stale in (tokens, conversation(2), conversation(3), conversation(700, 16)):
        assert rig.read(sequence_of(stale)) == []
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


def test_a_reset_while_recovery_runs_drops_what_recovery_finds(open_rig: Rigs) -> None:
    rig, device = open_rig()
    rig.put_all(sequence_of(conversation(1)))
    rig.close()
    device = held_device(bytes(device.image))
    again = Rig(device, found_slab(device.image))
    resetter = threading.Thread(target=again.store.reset)
    resetter.start()
    again.until(lambda: Op.WRITE in {request.op for request in device.pending})
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
    before = slab.own[0].generation
    started = time.monotonic()
    assert not rig.store.reset()
    assert time.monotonic() - started < 3
    assert rig.read(sequence, wait=False) == [], "in this process the reset holds all the same"
    rig.put_all(sequence_of(conversation(2)))
    assert rig.check_read(sequence_of(conversation(2))) == 3, "DRAM goes on"
    slow.release()
    memory.settle()
    assert found_slab(memory.image).own[0].generation != before, "it is done when it can be"
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


def test_closing_writes_what_is_dirty_before_it_reads_what_was_wanted(
    open_rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CLOSE_DEADLINE_S", 0.6)
    rig, device = open_rig(num_records=40, dram_slots=40)
    rig.put_all(sequence_of(conversation(1, 30 * 16)))
    rig.close()
    memory = MemoryDevice(device.size_bytes)
    memory.image[:] = device.image
    late = Rig(SlowDevice(memory, delay_s=0.1), found_slab(memory.image), dram_slots=40, depth=2)
    late.until(lambda: "recovered" in late.store.figures().counts)
    late.store.find(lookup_of(conversation(1, 30 * 16)), 0, 30 * 16)  # 1.5 s of reads
    late.put_all(sequence_of(conversation(2, 16)))
    late.close()
    again, _ = open_rig(image=bytes(memory.image))
    assert again.check_read(sequence_of(conversation(2, 16))) == 1
