# SPDX-License-Identifier: Apache-2.0
"""The store over a device in memory: save, write back, evict, prefetch, load; and a restart.

It is long since all calls of the store are tried over one rig.

`settle()` lets the store's own thread do all it can, so these tests are the same every time.
"""

from __future__ import annotations

import math
import threading
import time

import pytest

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.cost import READS_MIN
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.types import DRAM, NVME, Flow
from tests.helpers import (
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Rig,
    Rigs,
    conversation,
    found_slab,
    held_device,
    lookup_of,
    name_of,
    names_of,
    nvme_only,
    payload_of,
    push_out_of_dram,
    sequence_of,
)

# ---- when it will be there -------------------------------------------------------------


def three_on_nvme(open_rig: Rigs) -> tuple[Rig, list[SequenceKeys]]:
    """Three chunks each, on a disk that answers nothing, and is known to take 10 ms a read."""
    rig, device = open_rig(num_records=32)
    sequences = [sequence_of(conversation(n)) for n in (1, 2, 3)]
    for sequence in sequences:
        rig.put_all(sequence)
        device.settle()
    push_out_of_dram(rig, device, 16)
    device.hold()
    reads = rig.store.thread.tiers[0].cost
    for _ in range(READS_MIN):
        reads.observe(0.01)
    return rig, sequences


def test_the_stores_thread_places_what_begun_requests_leave(open_rig: Rigs) -> None:
    rig, device = open_rig(num_records=32)
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    device.settle()
    clean = rig.store.residency.dram.clean
    before = len(clean)
    with rig.store.queue() as queue:
        queue.append("a")
    found = rig.store.find(Lookup(sequence), 0, 40, request_id="a")
    assert len(clean) < before
    rig.store.leave_queue(["a"])
    assert found
    assert len(clean) < before, "no step waits for it"
    rig.store.tick()
    assert len(clean) == before


def test_what_nearer_requests_want_comes_first(open_rig: Rigs) -> None:
    rig, sequences = three_on_nvme(open_rig)
    arrivals = []
    for number, sequence in enumerate(sequences):
        with rig.store.queue() as queue:
            queue.append(str(number))
        found = rig.store.find(Lookup(sequence), 0, 40, request_id=str(number))
        assert len(found) == 3
        seconds = rig.store.arrivals(str(number), found)
        assert seconds is not None
        assert seconds == sorted(seconds)
        arrivals.append(seconds[-1])
    # Four are read at a time; each comes after all of those before it.
    assert arrivals == pytest.approx([3 * 0.01, 6 * 0.01, 9 * 0.01])


def test_nothing_is_read_that_would_sooner_be_computed(open_rig: Rigs) -> None:
    """Before its turn, or behind others that run before it, a request still gets what it wants."""
    rig, sequences = three_on_nvme(open_rig)
    rig.store.weigh_reads(lambda start, stop: (stop - start) * 1e-4)  # 1.6 ms a chunk
    chunks = [[rig.chunk(name) for name in names_of(sequence)] for sequence in sequences]

    def states() -> list[set[State]]:
        return [{chunk.dram.state for chunk in some} for some in chunks]

    with rig.store.queue() as queue:
        for number in range(3):
            queue.append(str(number))
    found = rig.store.find(Lookup(sequences[0]), 0, 40, request_id="0")
    assert states()[0] == {State.ABSENT}
    assert not rig.store.has_missing("0"), "it does not wait for what is not read"
    assert rig.store.arrivals("0", found) == [math.inf] * 3, "nor for what might be"
    with rig.store.queue():
        pace = rig.store.residency.dram.pace
        for turn in range(400):
            pace.left(1, True, turn * 0.05)
    rig.store.find(Lookup(sequences[2]), 0, 40, request_id="2")
    assert states() == [{State.ABSENT}, {State.ABSENT}, {State.READING}]
    rig.store.weigh_reads(lambda start, stop: (stop - start) * 1e-2)
    rig.store.find(Lookup(sequences[0]), 0, 40, request_id="0")
    assert State.READING in states()[0], "asked again, it is weighed again"


def test_without_a_queue_what_was_wanted_earlier_comes_first(open_rig: Rigs) -> None:
    rig, sequences = three_on_nvme(open_rig)
    found = [rig.store.find(Lookup(sequence), 0, 40) for sequence in sequences]
    arrivals = [rig.store.arrivals("unknown", pieces) for pieces in found]
    # Four are being read, one of them the second's.
    assert [times[-1] for times in arrivals if times] == pytest.approx([0.04, 0.06, 0.09])


# ---- the way up and down ---------------------------------------------------------------


def test_what_is_saved_is_read_from_dram(open_rig: Rigs) -> None:
    rig, device = open_rig()
    device.hold()  # no I/O is needed
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    assert rig.check_read(sequence) == 3
    assert rig.store.tiers(rig.store.find(Lookup(sequence), 0, 40), 0) == {DRAM: 40}


def test_written_back_evicted_prefetched_equal(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    assert rig.store.is_idle()
    sequence = sequence_of(tokens)
    pieces = rig.store.find(Lookup(sequence), 0, 40)
    device.settle()
    assert rig.store.tiers(pieces, 0) == {NVME: 40}
    assert rig.check_read(sequence) == 3
    # Loaded once: a second load of the same bytes comes from DRAM.
    assert rig.store.tiers(pieces, 0) == {DRAM: 40}
    assert rig.store.figures().moved_bytes[Flow.PREFETCH] == 3 * RECORD_BYTES
    assert rig.store.figures().moved_bytes[Flow.WRITE_BACK] == 11 * RECORD_BYTES


def test_a_find_from_the_middle_prefetches_only_what_is_asked_for(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    rig.store.find(lookup_of(tokens), 16, 32)
    device.settle()
    places = [rig.chunk(name).dram.state for name in names_of(sequence_of(tokens))]
    assert places == [State.ABSENT, State.READY, State.ABSENT]


def test_reads_come_nearest_first(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    rig.store.find(lookup_of(tokens), 0, 40)
    names = names_of(sequence_of(tokens))
    wanted = [rig.slab.offset(rig.chunk(name).at(NVME).slot) for name in names]
    assert [request.offset for request in device.pending] == wanted
    device.step()
    device.settle()
    assert rig.store.hold_ready([], sequence_of(tokens), 40) == []
    held = rig.store.hold_ready(rig.store.find(lookup_of(tokens), 0, 40), sequence_of(tokens), 40)
    assert [piece.chunk.name for piece in held] == names[:1]
    rig.store.release(piece.chunk for piece in held)


def test_a_read_that_ends_out_of_order_is_not_offered_before_its_prefix(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    pieces = rig.store.find(lookup_of(tokens), 0, 40)
    device.step(1)
    device.settle()
    assert rig.store.hold_ready(pieces, sequence_of(tokens), 40) == []
    assert pieces[1].chunk.dram.state is State.READY


def test_a_run_that_is_too_short_is_neither_kept_nor_read(open_rig: Rigs) -> None:
    """Every chat shares its template's first tokens with all others."""
    rig, device = open_rig(dram_slots=2, grain=1)
    old, new = conversation(1, 16), conversation(2, 16)
    template = sequence_of([*old[:4], *conversation(3, 12)])
    rig.put_all(sequence_of(old))
    rig.put_all(sequence_of(new))
    device.settle()
    (piece,) = rig.store.find(Lookup(template), 0, 16, min_tokens=4)
    assert piece.stop == 4, "or this shows nothing"
    rig.store.find(lookup_of(new), 0, 16)
    assert rig.store.find(Lookup(template), 0, 16, min_tokens=5) == []
    push_out_of_dram(rig, device, 1)
    (piece,) = rig.store.find(lookup_of(new), 0, 16)
    assert piece.chunk.dram.state is State.READY, "the other one was pushed out"

    push_out_of_dram(rig, device, 2)
    device.hold()
    assert rig.store.find(lookup_of(old), 0, 16, min_tokens=17) == []
    device.settle()
    assert not device.pending


def test_reads_in_flight_are_limited_by_the_depth(open_rig: Rigs) -> None:
    rig, device = open_rig(num_records=32, dram_slots=16)
    tokens = conversation(1, 96)
    rig.put_all(sequence_of(tokens))
    device.settle()
    push_out_of_dram(rig, device, 16)
    device.hold()
    rig.store.find(lookup_of(tokens), 0, 96)
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
    rig.store.find(lookup_of(tokens), 0, 40)
    device.settle()
    assert [request.op for request in device.pending].count(Op.READ) == 3
    for _ in range(rig.depth // 2):
        device.step()
    device.settle()
    assert Op.WRITE not in [request.op for request in device.pending], "a write before the reads"


def test_writes_go_beside_reads_before_saves_are_lost(open_rig: Rigs) -> None:
    """With more than an eighth of DRAM dirty, waiting for an idle device would cost chunks."""
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    rig.store.find(lookup_of(tokens), 0, 40)
    rig.put_all(sequence_of(conversation(2, 64)))
    device.settle()
    assert {request.op for request in device.pending} == {Op.READ}
    rig.put_all(sequence_of(conversation(3, 16)))
    device.settle()
    assert {request.op for request in device.pending} == {Op.READ, Op.WRITE}


def test_a_save_without_room_is_dropped(open_rig: Rigs) -> None:
    rig, _ = open_rig(dram_slots=2)
    sequence = sequence_of(conversation(1))
    saving = [rig.store.begin_save(name) for name in names_of(sequence)]
    assert saving[2] is None
    assert rig.store.figures().counts["dropped"] == 1
    rig.store.finish_saves(chunk for chunk in saving if chunk is not None)


def test_room_for_a_read_that_comes_late_is_used(open_rig: Rigs) -> None:
    rig, device = open_rig(dram_slots=2)
    tokens = conversation(1, 16)
    rig.put_all(sequence_of(tokens))
    device.settle()
    push_out_of_dram(rig, device, 2)
    held = []
    for other in (700, 701):
        pieces = rig.store.find(lookup_of(conversation(other, 16)), 0, 16)
        held += rig.store.hold_ready(pieces, sequence_of(tokens), 40)
    assert len(held) == 2
    rig.store.find(lookup_of(tokens), 0, 16)
    device.settle()
    assert rig.chunk(name_of(sequence_of(tokens), 0)).dram.state is State.ABSENT
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
    gauges = rig.store.gauges()
    assert gauges["held_bytes", DRAM] == 3 * PAYLOAD_BYTES
    assert gauges["held_bytes", NVME] == 3 * RECORD_BYTES


# ---- restart ---------------------------------------------------------------------------


def test_a_restart_finds_what_was_written_back(open_rig: Rigs) -> None:
    rig, device = open_rig()
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    rig.close()  # writes back what is dirty
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 3
    assert again.check_read(sequence) == 3
    third, _ = open_rig(image=bytes(device.image))
    assert third.check_read(sequence) == 3


def put_spare(rig: Rig, sequence: SequenceKeys) -> None:
    """Save a chunk that is worth little."""
    name = name_of(sequence, 0)
    chunk = rig.store.begin_save(name, low_value=True)
    assert chunk is not None
    rig.pool.slot(chunk.dram.slot)[:] = payload_of(name)
    rig.store.write_if_room(chunk)
    rig.store.finish_saves([chunk])


def test_what_is_worth_little_is_written_while_there_is_room(open_rig: Rigs) -> None:
    rig, device = open_rig()
    put_spare(rig, sequence_of(conversation(1, 16)))
    device.settle()
    rig.close()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 1


def test_the_end_does_not_wait_for_what_is_worth_little(
    open_rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, device = open_rig()
    device.hold()
    rig.put_all(sequence_of(conversation(1, 48)))  # three, of which two are written at a time
    device.settle()
    put_spare(rig, sequence_of(conversation(2, 16)))
    # Called when the store has begun to end, so that all is still to be written then.
    monkeypatch.setattr(rig.store.thread.reader, "forget_wanted", device.release)
    rig.close()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 3
    assert again.store.find(lookup_of(conversation(2, 16)), 0, 16) == []


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
    assert not last.store.find(lookup_of(conversation(2, 16)), 0, 16), "2 was the oldest then"


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
    again.store.check_integrity()
    again.close()


# ---- waiting ---------------------------------------------------------------------------


def test_an_empty_step_sleeps_until_a_run_has_come(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    pieces = rig.store.find(lookup_of(tokens), 0, 40)
    threading.Timer(0.05, device.release).start()
    started = time.monotonic()
    rig.store.wait_for_any([pieces], 5.0)
    assert time.monotonic() - started < 4
    held = rig.store.hold_ready(pieces, sequence_of(tokens), 40)
    assert len(held) == 3
    rig.store.release(piece.chunk for piece in held)


def test_an_empty_step_does_not_wait_for_what_will_never_come(open_rig: Rigs) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    pieces = rig.store.find(lookup_of(tokens), 0, 40)
    rig.store.residency.drop(pieces[1].chunk)
    started = time.monotonic()
    rig.store.wait_for_any([pieces], 5.0)
    assert time.monotonic() - started < 4


@pytest.mark.parametrize("waiting", [0, 1])
def test_an_empty_step_ends_at_its_deadline(open_rig: Rigs, waiting: int) -> None:
    rig, device = open_rig()
    tokens = nvme_only(rig, device)
    device.hold()
    pieces = rig.store.find(lookup_of(tokens), 0, 40)
    started = time.monotonic()
    rig.store.wait_for_any([pieces] * waiting, 0.02)
    assert 0.015 < time.monotonic() - started < 4


@pytest.mark.parametrize("has_end", [True, False])
def test_an_end_is_used_by_all_who_have_its_blocks(open_rig: Rigs, has_end: bool) -> None:
    """Not only by who has its end: else a planted guess would tell that it was right."""
    rig, _ = open_rig()
    tokens = conversation(1, 16 + 4 + 3)  # a chunk, a block, and an end behind it
    rig.put_all(sequence_of(tokens))
    tail = rig.chunk(name_of(sequence_of(tokens), 1))
    before = rig.store.residency.run_of(tail)
    asked = [*tokens, 7] if has_end else [*tokens[:20], 8, 8, 8, 7]
    with rig.store.queue() as queue:
        queue.append("r")
    _, visit = rig.store.arrive("r", lookup_of(asked), len(asked))
    assert rig.store.residency.run_of(tail) is visit.own is not before
    rig.store.leave_queue(["r"])


def test_an_end_is_not_used_by_who_has_not_its_blocks(open_rig: Rigs) -> None:
    rig, _ = open_rig()
    tokens = conversation(1, 16 + 4 + 3)
    rig.put_all(sequence_of(tokens))
    tail = rig.chunk(name_of(sequence_of(tokens), 1))
    before = rig.store.residency.run_of(tail)
    asked = [*tokens[:19], 8, *tokens[20:], 7]
    with rig.store.queue() as queue:
        queue.append("r")
    rig.store.arrive("r", lookup_of(asked), len(asked))
    assert rig.store.residency.run_of(tail) is before
    rig.store.leave_queue(["r"])
