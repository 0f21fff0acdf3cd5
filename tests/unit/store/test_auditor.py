# SPDX-License-Identifier: Apache-2.0
"""Stored chunks beside copies of what was computed, over a store in memory.

It is long since all that may be under way when an audit ends has its story here.
"""

from __future__ import annotations

import json
import logging
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.cli.inspect import show_audits
from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.kv_causes import ALL_DIFFER
from attnstore_vllm.policy.kv_compare import STATE_BOUND, Comparison, Side, Unit
from attnstore_vllm.policy.learned_bound import PAIRS
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.store import trial
from attnstore_vllm.tiers.nvme.aside import Aside, is_stopped, kept, stopped_path, stops
from attnstore_vllm.tiers.remote_io import RemoteIo
from attnstore_vllm.types import NVME, Event
from tests.helpers import (
    NAMESPACE,
    PAYLOAD_BYTES,
    Rig,
    Rigs,
    conversation,
    name_of,
    names_of,
    payload_of,
    push_out_of_dram,
    sequence_of,
)

BITS = Comparison([Unit(0, 0, 0, PAYLOAD_BYTES // 8), Unit(0, 1, PAYLOAD_BYTES // 2, 1024)], None)
"""Two layers of 4 blocks."""
NUMBERS = np.arange(PAYLOAD_BYTES // 16).reshape(1, 1, -1)
BY_DISTANCE = Comparison([Unit(0, 0, 0, PAYLOAD_BYTES // 8)], [Side("K", "float16", NUMBERS)])
STATES = Comparison(BY_DISTANCE.units, BY_DISTANCE.sides, most=STATE_BOUND)
ALL = [range(4)]
HANGS_MS = 60_000
"""A device is given so long: one that hangs may not give a request back when it is asked to."""
SECRET = 4242
"""A token that no file and no line may have."""


def audited(open_rig: Rigs, path: Path, **options: Any) -> tuple[Rig, MemoryDevice]:
    given = {"stop_after": 100, **options.pop("audit", {})}
    options.setdefault("comparisons", (BITS,))
    return open_rig(audit=AuditConfig(rate=1.0, **given), path=path, **options)


def compare(
    rig: Rig,
    chunk: Chunk,
    computed: bytes,
    hit: int = 1,
    blocks: Sequence[range] = ALL,
    **how: Any,
) -> None:
    """As the workers copy it, until all is over."""
    copy = rig.store.begin_audit(hit, chunk, chunk.dram, blocks, **how)
    assert copy is not None
    assert rig.store.residency.index.get(chunk.name.key) is chunk, "the copy is not found"
    rig.pool.slot(copy.dram.slot)[:] = computed
    rig.store.finish_saves([copy])
    rig.until_idle()
    rig.hears()


def outcomes(rig: Rig) -> dict[str, int]:
    counts = rig.store.figures().counts
    names = (Event.AGREED, Event.DIFFERED, Event.NOT_COMPARED)
    return {name.value: counts[name] for name in names if counts.get(name)}


def test_the_cause_is_looked_for_once_a_hit(
    open_rig: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the store's thread as long as two comparisons; a hit may have hundreds of chunks."""
    rig, _ = audited(open_rig, tmp_path)
    with caplog.at_level(logging.ERROR):
        for number, hit in enumerate((1, 1, 2)):
            wrong = stored(rig, conversation(number), payload=bytes(len(rig.pool.slot(0))))
            compare(rig, wrong, payload_of(wrong.name), hit=hit)
    assert [ALL_DIFFER in record.getMessage() for record in caplog.records] == [True, False, True]


def stored(rig: Rig, tokens: list[int], **given: bytes) -> Chunk:
    name = name_of(sequence_of(tokens), 0)
    assert rig.put(name, given.get("payload")) is not None
    return rig.chunk(name)


def test_what_agrees_stays_and_the_copy_goes(open_rig: Rigs, tmp_path: Path) -> None:
    rig, device = audited(open_rig, tmp_path)
    chunk = stored(rig, conversation(1))
    device.settle()
    free = len(rig.store.residency.dram.free)
    compare(rig, chunk, payload_of(chunk.name))
    assert outcomes(rig) == {"agreed": 1}
    assert len(rig.store.residency.dram.free) == free
    assert rig.read(sequence_of(conversation(1, 16))) == [(chunk.name, payload_of(chunk.name))]
    assert rig.store.figures().counts["saved"] == 1 and rig.store.figures().counts["written"] == 1
    assert not list(tmp_path.iterdir())


def test_what_differs_leaves_all_tiers_also_for_the_next_start(
    open_rig: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig, device = audited(open_rig, tmp_path)
    wrong = bytearray(payload_of(name_of(sequence_of([SECRET] * 16), 0)))
    wrong[5000] ^= 1
    chunk = stored(rig, [SECRET] * 40, payload=bytes(wrong))
    right = stored(rig, conversation(2))
    device.settle()
    assert chunk.at(NVME).state is State.READY
    with caplog.at_level(logging.ERROR):
        compare(rig, chunk, payload_of(chunk.name))
    assert outcomes(rig) == {"differed": 1}
    assert chunk.dropped
    assert rig.read(sequence_of([SECRET] * 40)) == []
    device.settle()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 1, "the other one"
    assert again.chunk(right.name)
    assert again.store.figures().counts["corrupt"] == 0, "zeros are no damage"
    (line,) = [record.getMessage() for record in caplog.records]
    assert chunk.name.key.hex()[:16] in line and "rank 0, layer 1: other bits" in line
    assert str(SECRET) not in line


def test_what_cannot_be_removed_from_the_disk_leaves_nothing_to_the_next_start(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """One write fails, or is given up since it is late: its record is whole."""
    rig, device = audited(open_rig, tmp_path)
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    stored(rig, conversation(2))
    device.settle()
    copy = rig.store.begin_audit(1, chunk, chunk.dram, ALL)
    assert copy is not None
    rig.pool.slot(copy.dram.slot)[:] = payload_of(chunk.name)
    device.hold()
    rig.store.finish_saves([copy])
    rig.until(lambda: bool(device.pending))
    device.cancel([request.tag for request in device.pending])
    device.release()
    rig.until_idle()
    device.settle()
    assert outcomes(rig) == {"differed": 1}
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


@pytest.mark.parametrize("in_use", [True, False])
def test_a_stop_waits_until_what_differs_is_removed(
    open_rig: Rigs, tmp_path: Path, in_use: bool
) -> None:
    """Also where the disk was late, and nothing else is written."""
    rig, device = audited(open_rig, tmp_path)
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    device.settle()
    copy = rig.store.begin_audit(1, chunk, chunk.dram, ALL)
    assert copy is not None
    rig.pool.slot(copy.dram.slot)[:] = payload_of(chunk.name)
    device.hold()
    rig.store.finish_saves([copy])
    rig.until(lambda: bool(device.pending))
    if not in_use:
        rig.store.thread.tiers[0].health.note_hang("a read")
    slow = threading.Timer(0.3, device.release)
    slow.start()
    rig.close()
    slow.join()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


def test_a_stop_waits_until_a_reset_of_an_audit_is_on_the_disk(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """The trial of a start has failed, and no caller waits for the reset."""
    rig, device = audited(open_rig, tmp_path)
    stored(rig, conversation(1))
    device.settle()
    assert rig.store.audit is not None
    device.hold()
    rig.store.audit.reset()
    slow = threading.Timer(0.3, device.release)
    slow.start()
    rig.close()
    slow.join()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("is_exact", [True, False])
def test_what_is_behind_it_goes_too(
    open_rig: Rigs, tmp_path: Path, order: Sequence[int], is_exact: bool
) -> None:
    """KV that was computed of wrong KV may differ by less than the bound. Bit for bit it cannot."""
    rig, _ = audited(open_rig, tmp_path)
    assert rig.store.audit is not None
    if not is_exact:
        rig.store.audit.comparisons[0] = BY_DISTANCE
    names = names_of(sequence_of(conversation(1, 48)))
    bits = [np.frombuffer(payload_of(name), np.uint16) & 0x3FFF for name in names]  # finite
    for name, numbers in zip(names, bits, strict=True):
        assert rig.put(name, numbers.tobytes()) is not None
    chunks = [rig.chunk(name) for name in names]
    other = stored(rig, conversation(2))
    for number in order:
        wrong = bits[number] ^ np.uint16(0x8000 if number == 1 else 0)  # every number's sign
        compare(rig, chunks[number], wrong.tobytes())
    assert [chunk.dropped for chunk in chunks] == [False, True, not is_exact]
    assert not other.dropped
    assert outcomes(rig) == {"agreed": 2, "differed": 1}


def by_distance(open_rig: Rigs, path: Path, comparison: Comparison = BY_DISTANCE) -> Rig:
    rig, _ = audited(open_rig, path, comparisons=(comparison,))
    return rig


def numbers_of(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(PAYLOAD_BYTES // 2).astype(np.float16)


def off_by(
    rig: Rig, number: int, part: float, *, is_ours: bool = True, **how: Any
) -> dict[str, int]:
    """What comes of a chunk whose stored numbers are all off by a part."""
    right = numbers_of(number)
    chunk = stored(rig, conversation(number), payload=(right * (1 + part)).tobytes())
    chunk.brought_by = "" if is_ours else NVME
    before = outcomes(rig)
    compare(rig, chunk, right.tobytes(), hit=number, **how)
    rig.store.drop([chunk])  # makes room
    return {name: n - before.get(name, 0) for name, n in outcomes(rig).items()}


def learns(rig: Rig, **how: Any) -> None:
    for number in range(PAIRS):
        assert off_by(rig, number, 0.01, **how)["agreed"] == 1


def test_a_bound_is_learned_from_what_was_computed_twice(open_rig: Rigs, tmp_path: Path) -> None:
    """And holds after a restart, in the same namespace."""
    rig = by_distance(open_rig, tmp_path)
    learns(rig, is_ours=False)
    assert off_by(rig, 100, 0.2, is_ours=False)["agreed"] == 1, "nothing is known yet"
    learns(rig)
    assert off_by(rig, 101, 0.2)["differed"] == 1
    (file,) = (tmp_path / "audit").glob("learned")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = by_distance(open_rig, tmp_path)
    assert off_by(again, 102, 0.2)["differed"] == 1
    assert off_by(again, 103, 0.05)["agreed"] == 1
    file.write_text(file.read_text().replace(NAMESPACE.hex(), "00"))
    another = by_distance(open_rig, tmp_path)
    assert off_by(another, 104, 0.2)["agreed"] == 1


def test_one_chunk_teaches_once(open_rig: Rigs, tmp_path: Path) -> None:
    """A burst behind one system prompt has the same chunk compared again and again."""
    rig = by_distance(open_rig, tmp_path)
    for _ in range(2 * PAIRS):
        assert off_by(rig, 1, 0.01)["agreed"] == 1
    assert off_by(rig, 101, 0.2)["agreed"] == 1, "nothing is known yet"
    assert not (tmp_path / "audit" / "learned").exists()


def test_wrong_kv_that_passes_widens_no_bound(open_rig: Rigs, tmp_path: Path) -> None:
    """Of a chunk among the first ones, that many hits have; nor at the next start."""
    rig = by_distance(open_rig, tmp_path)
    payload = (numbers_of(99) * np.float16(1.45)).tobytes()
    chunk = stored(rig, conversation(99), payload=payload)
    for number in range(4):
        compare(rig, chunk, numbers_of(99).tobytes(), hit=1000 + number)
    rig.store.drop([chunk])
    assert outcomes(rig) == {"agreed": 4}
    learns(rig)
    assert off_by(rig, 101, 0.3)["differed"] == 1
    again = by_distance(open_rig, tmp_path)
    assert off_by(again, 102, 0.3)["differed"] == 1


def test_nothing_is_learned_of_states(open_rig: Rigs, tmp_path: Path) -> None:
    """They agree to the bit as long as steps end at the same places."""
    rig = by_distance(open_rig, tmp_path, STATES)
    learns(rig)
    assert off_by(rig, 100, 0.7)["agreed"] == 1
    assert off_by(rig, 101, -3.0)["differed"] == 1
    assert not (tmp_path / "audit" / "learned").exists()


def test_the_bytes_are_kept_for_their_owner_alone(open_rig: Rigs, tmp_path: Path) -> None:
    rig, _ = audited(open_rig, tmp_path)
    wrong = bytes(PAYLOAD_BYTES)
    chunk = stored(rig, [SECRET] * 40, payload=wrong)
    compare(rig, chunk, payload_of(chunk.name), blocks=[range(1, 3)])
    ((path, head),) = kept(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert head is not None
    assert (head["key"], head["position"], head["blocks"]) == (chunk.name.key.hex(), 0, [1, 3])
    content = path.read_bytes().partition(b"\n")[2]
    computed = payload_of(chunk.name)
    expected = [slot[a : a + 2048] for slot in (wrong, computed) for a in (1024, 4096 + 1024)]
    assert content == b"".join(expected), "what was compared, and nothing else of the slots"
    assert str(SECRET) not in json.dumps(head)


@pytest.mark.parametrize("keep_bytes", [None, 20_000])
def test_no_more_is_kept_than_there_is_room_for(
    open_rig: Rigs, tmp_path: Path, keep_bytes: int | None
) -> None:
    rig, _ = audited(open_rig, tmp_path, audit={"keep_bytes": keep_bytes})
    for number in range(4):
        chunk = stored(rig, conversation(number), payload=bytes(PAYLOAD_BYTES))
        compare(rig, chunk, payload_of(chunk.name), hit=number)
    assert outcomes(rig) == {"differed": 4}
    files = [path for path, _ in kept(tmp_path)] if keep_bytes else []
    assert len(files) == (1 if keep_bytes else 0)
    assert keep_bytes or not list(tmp_path.iterdir())


@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.parametrize("ttl_s", [None, 3600.0])
def test_what_has_a_ttl_is_kept_only_if_the_audit_is_asked_for(
    open_rig: Rigs, tmp_path: Path, by_default: bool, ttl_s: float | None
) -> None:
    rig, _ = audited(open_rig, tmp_path, audit={"by_default": by_default})
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    chunk.run = unknown_run(time.monotonic(), ttl_s)
    compare(rig, chunk, payload_of(chunk.name))
    assert outcomes(rig) == {"differed": 1}
    assert bool(list(kept(tmp_path))) == (ttl_s is None or not by_default)


def test_after_so_many_hits_nothing_is_served(
    open_rig: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig, _ = audited(open_rig, tmp_path, audit={"stop_after": 2})
    good = sequence_of(conversation(9))
    rig.put_all(good)
    for number in range(2):  # chunks of one hit count once
        chunk = stored(rig, conversation(number), payload=bytes(PAYLOAD_BYTES))
        compare(rig, chunk, payload_of(chunk.name), hit=7)
    assert not rig.store.is_distrusted and rig.check_read(good) == 3
    chunk = stored(rig, conversation(3), payload=bytes(PAYLOAD_BYTES))
    with caplog.at_level(logging.ERROR):
        compare(rig, chunk, payload_of(chunk.name), hit=8)
    assert rig.store.is_distrusted
    assert rig.read(good) == [], "what is right is not believed either"
    mark = stopped_path(tmp_path, NAMESPACE)
    assert stops(tmp_path) == [mark] and is_stopped(tmp_path, NAMESPACE)
    assert not is_stopped(tmp_path, bytes(32))
    assert stat.S_IMODE(mark.stat().st_mode) == 0o600
    assert str(mark) in caplog.records[-1].getMessage()
    assert "2 hits" in mark.read_text()


def test_one_chunk_that_many_hits_have_at_once_is_one_alarm(open_rig: Rigs, tmp_path: Path) -> None:
    """They were drawn before the first of them was compared, and the chunk was removed."""
    rig, _ = audited(open_rig, tmp_path, audit={"stop_after": 2}, dram_slots=32)
    wrong = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    copies = [rig.store.begin_audit(hit, wrong, wrong.dram, ALL) for hit in (1, 2, 3)]
    for copy in copies:
        assert copy is not None
        rig.pool.slot(copy.dram.slot)[:] = payload_of(wrong.name)
        rig.store.finish_saves([copy])
    rig.until_idle()
    rig.hears()
    assert outcomes(rig) == {"differed": 3}
    assert not rig.store.is_distrusted
    other = stored(rig, conversation(2), payload=bytes(PAYLOAD_BYTES))
    compare(rig, other, payload_of(other.name), hit=4)
    assert rig.store.is_distrusted


def test_a_directory_that_cannot_be_written_to_is_told(
    open_rig: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig, _ = audited(open_rig, tmp_path / "gone", audit={"stop_after": 1})
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    compare(rig, chunk, payload_of(chunk.name))
    assert rig.store.is_distrusted, "it stops all the same"
    assert all("Nothing could be written" in record.getMessage() for record in caplog.records)


def test_a_stop_that_cannot_be_noted_leaves_nothing_to_the_next_start(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """A full disk, whose slab has its room: no mark keeps a start from serving what is there."""
    rig, device = audited(open_rig, tmp_path / "gone", audit={"stop_after": 1})
    rig.put_all(sequence_of(conversation(9)))
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    rig.until_idle()
    compare(rig, chunk, payload_of(chunk.name))
    device.settle()
    assert rig.store.is_distrusted
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


def test_what_is_not_there_any_more_is_not_compared(open_rig: Rigs, tmp_path: Path) -> None:
    rig, device = audited(open_rig, tmp_path)
    chunk = stored(rig, conversation(1))
    was = chunk.dram
    device.settle()
    push_out_of_dram(rig, device, 8)
    assert rig.store.begin_audit(1, chunk, was, ALL) is None, "only NVMe has it"
    assert rig.check_read(sequence_of(conversation(1, 16))) == 1
    assert chunk.dram.state is State.READY
    assert rig.store.begin_audit(1, chunk, was, ALL) is None, "it came up again since"
    rig.store.drop([chunk])
    assert rig.store.begin_audit(1, chunk, chunk.dram, ALL) is None
    assert outcomes(rig) == {"not_compared": 3}


def test_a_copy_that_was_given_up_says_nothing(open_rig: Rigs, tmp_path: Path) -> None:
    rig, _ = audited(open_rig, tmp_path)
    chunk = stored(rig, conversation(1))
    copy = rig.store.begin_audit(1, chunk, chunk.dram, ALL)
    assert copy is not None
    rig.store.drop([copy])
    rig.store.finish_saves([copy])
    rig.until_idle()
    assert outcomes(rig) == {"not_compared": 1}
    assert not chunk.dropped


def test_a_reset_meanwhile_says_nothing(open_rig: Rigs, tmp_path: Path) -> None:
    """Weights may have changed since the chunk was stored."""
    rig, _ = audited(open_rig, tmp_path)
    chunk = stored(rig, conversation(1))
    copy = rig.store.begin_audit(1, chunk, chunk.dram, ALL)
    assert copy is not None
    assert rig.store.reset()
    rig.pool.slot(copy.dram.slot)[:] = bytes(PAYLOAD_BYTES)
    rig.store.finish_saves([copy])
    rig.until_idle()
    assert outcomes(rig) == {"not_compared": 1}


def test_a_copy_takes_no_room_from_what_would_have_to_be_computed(
    open_rig: Rigs, tmp_path: Path
) -> None:
    rig, device = audited(open_rig, tmp_path)
    device.hold()
    chunks = [stored(rig, conversation(number)) for number in range(8)]
    assert rig.store.begin_audit(1, chunks[0], chunks[0].dram, ALL) is None, "all is dirty"
    device.release()
    device.settle()
    compare(rig, chunks[0], payload_of(chunks[0].name))
    assert outcomes(rig) == {"agreed": 1, "not_compared": 1}
    assert chunks[0].dram.state is State.READY, "what is compared is no victim"


def test_clients_and_others_leave_places(
    open_rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight places clients may have four; two, while a tier is tried, and others two."""
    monkeypatch.setattr(trial, "PUT_OFF_S", 0.0)
    rig, device = audited(open_rig, tmp_path, dram_slots=64)
    rig.put_all(sequence_of(conversation(1, 20 * 16)))
    device.settle()
    chunks = [rig.chunk(name) for name in names_of(sequence_of(conversation(1, 20 * 16)))]

    def num_begun(number: int, **how: Any) -> int:
        given = [rig.store.begin_audit(1, c, c.dram, ALL, 0, **how) for c in chunks[:number]]
        begun.extend(copy for copy in given if copy is not None)
        return sum(copy is not None for copy in given)

    begun: list[Chunk] = []
    assert num_begun(8, is_asked=True) == 4
    assert num_begun(8) == 4
    rig.store.drop(begun)
    rig.store.finish_saves(begun)
    rig.until_idle()
    begun.clear()
    assert rig.store.audit is not None
    tried = chunks.pop()
    tried.brought_by = NVME
    rig.store.audit.put_off([Piece(tried, 0, 16)], [])
    assert num_begun(8, is_asked=True) == 2
    assert num_begun(8) == 2
    chunks = 8 * [tried]
    assert num_begun(8) == 4, "for the trial"
    while_open = []
    for _ in range(trial.PUT_OFF_MAX):
        while_open.append(rig.store.audit.trial.is_open(NVME))
        rig.store.audit.put_off([Piece(tried, 0, 16)], [])
    assert all(while_open), "for one hit there was no place: it is none of so many"
    assert not rig.store.audit.trial.is_open(NVME)
    rig.store.drop(begun)
    rig.store.finish_saves(begun)
    rig.until_idle()


def test_copies_are_few_at_a_time(open_rig: Rigs, tmp_path: Path) -> None:
    rig, device = audited(open_rig, tmp_path, dram_slots=16)
    sequence = sequence_of(conversation(1))
    rig.put_all(sequence)
    device.settle()
    chunks = [rig.chunk(name) for name in names_of(sequence)]
    copies = [rig.store.begin_audit(1, chunk, chunk.dram, ALL) for chunk in chunks]
    assert [copy is not None for copy in copies] == [True, True, False]
    for copy in copies[:2]:
        assert copy is not None
        rig.pool.slot(copy.dram.slot)[:] = payload_of(copy.name)
    rig.store.finish_saves([copy for copy in copies if copy is not None])
    rig.until_idle()
    assert outcomes(rig) == {"agreed": 2, "not_compared": 1}


def begin_to_compare(rig: Rig, chunk: Chunk, computed: bytes, hit: int = 1) -> None:
    """As compare(), while the device may hang."""
    copy = rig.store.begin_audit(hit, chunk, chunk.dram, ALL)
    assert copy is not None
    rig.pool.slot(copy.dram.slot)[:] = computed
    rig.store.finish_saves([copy])


def being_written(rig: Rig, device: MemoryDevice) -> Chunk:
    """A wrong chunk whose write hangs."""
    device.hold()
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    rig.until(lambda: chunk.at(NVME).state is State.WRITING)
    return chunk


def test_what_differs_is_not_served_while_a_write_of_it_hangs(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """And once that has ended, the next start does not find its record."""
    rig, device = audited(open_rig, tmp_path, io_deadline_ms=HANGS_MS)
    chunk = being_written(rig, device)
    begin_to_compare(rig, chunk, payload_of(chunk.name))
    rig.until(lambda: bool(outcomes(rig)))
    assert outcomes(rig) == {"differed": 1}
    assert rig.read(sequence_of(conversation(1, 16)), wait=False) == []
    device.release()
    rig.until_idle()
    device.settle()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


def test_a_write_that_hangs_keeps_no_other_chunk_from_being_compared(
    open_rig: Rigs, tmp_path: Path
) -> None:
    given = {"audit": {"stop_after": 2}, "dram_slots": 16, "io_deadline_ms": HANGS_MS}
    rig, device = audited(open_rig, tmp_path, **given)
    other = stored(rig, conversation(2), payload=bytes(PAYLOAD_BYTES))
    device.settle()
    chunk = being_written(rig, device)
    for hit, one in enumerate((chunk, other)):
        begin_to_compare(rig, one, payload_of(one.name), hit=hit)
    rig.until(lambda: rig.store.is_distrusted)
    device.release()
    rig.until_idle()


def test_a_stop_waits_until_what_is_being_written_is_removed(
    open_rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the store's thread comes to it some time after the write has ended."""
    rig, device = audited(open_rig, tmp_path, io_deadline_ms=HANGS_MS)
    chunk = being_written(rig, device)
    begin_to_compare(rig, chunk, payload_of(chunk.name))
    assert rig.store.audit is not None
    tick = rig.store.audit.tick

    def late() -> bool:
        time.sleep(0.05)
        return tick()

    monkeypatch.setattr(rig.store.audit, "tick", late)
    timers = [threading.Timer(0.3, device.step), threading.Timer(0.6, device.release)]
    for timer in timers:
        timer.start()
    rig.close()
    for timer in timers:
        timer.join()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


def test_what_is_behind_it_is_removed_once_it_is_written(open_rig: Rigs, tmp_path: Path) -> None:
    given = {"comparisons": (BY_DISTANCE,), "dram_slots": 16, "io_deadline_ms": HANGS_MS}
    rig, device = audited(open_rig, tmp_path, **given)
    device.hold()
    names = names_of(sequence_of(conversation(1, 32)))
    right = numbers_of(1).tobytes()
    for name in names:
        assert rig.put(name, right) is not None
    first, behind = map(rig.chunk, names)
    rig.until(lambda: behind.at(NVME).state is State.WRITING)
    for chunk, computed in ((behind, right), (first, (-numbers_of(1)).tobytes())):
        begin_to_compare(rig, chunk, computed)
    rig.until(lambda: outcomes(rig) == {"agreed": 1, "differed": 1})
    assert first.dropped and behind.dropped
    device.release()
    rig.until_idle()
    device.settle()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 0


def test_a_kept_file_that_is_not_whole_is_told(tmp_path: Path) -> None:
    aside = Aside(tmp_path, 1 << 20)
    whole = aside.keep({"key": "ab"}, b"\xab" * 32, [memoryview(b"x")])
    assert whole is not None
    cut = whole.with_name("0" + whole.name)
    cut.touch(mode=0o600)
    assert list(kept(tmp_path)) == [(cut, None), (whole, {"key": "ab"})]


def test_a_tail_that_a_longer_chunk_replaces_is_still_compared(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """The next turn of a conversation, which is the usual hit, replaces the tail that it found."""
    rig, device = audited(open_rig, tmp_path, audit={"stop_after": 2})
    tail = stored(rig, conversation(1, 8), payload=bytes(PAYLOAD_BYTES))
    device.settle()
    copy = rig.store.begin_audit(1, tail, tail.dram, [range(2)])
    assert copy is not None
    stored(rig, conversation(1, 16))
    assert tail.dropped
    rig.pool.slot(copy.dram.slot)[:] = payload_of(tail.name)
    rig.store.finish_saves([copy])
    rig.until_idle()
    assert outcomes(rig) == {"differed": 1}
    device.settle()
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts["recovered"] == 1, "the longer one"
    assert not rig.store.is_distrusted
    rig.hears()
    chunk = stored(rig, conversation(2), payload=bytes(PAYLOAD_BYTES))
    compare(rig, chunk, payload_of(chunk.name), hit=2)
    assert rig.store.is_distrusted, "a hit with a wrong tail is one of so many"


def test_inspect_lists_what_an_audit_has_left(
    open_rig: Rigs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig, _ = audited(open_rig, tmp_path, audit={"stop_after": 1})
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    compare(rig, chunk, payload_of(chunk.name))
    aside = Aside(tmp_path, 1 << 20)
    strange = aside.keep({"found": "\x1b[2J", "position": ["x"]}, bytes(32), [])
    (tmp_path / SLAB_NAME).touch()
    show_audits(tmp_path)
    said = capsys.readouterr().out
    assert f"not served: {stopped_path(tmp_path, NAMESPACE)} is there" in said
    assert "16 tokens from token 0 of a prompt; rank 0, layer 0: other bits" in said
    assert str(strange) in said and "\x1b" not in said


def test_after_that_nothing_is_shared(open_rig: Rigs, tmp_path: Path) -> None:
    others = MakeRemoteDict(Others())
    rig, _ = audited(open_rig, tmp_path, audit={"stop_after": 1}, more_tiers=(others,))
    tier = rig.store.thread.tiers[1]
    assert isinstance(tier, RemoteIo) and not tier.has_left
    chunk = stored(rig, conversation(1), payload=bytes(PAYLOAD_BYTES))
    compare(rig, chunk, payload_of(chunk.name))
    assert rig.store.is_distrusted
    assert tier.has_left, "what recovery still finds is told to none"
