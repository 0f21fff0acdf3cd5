# SPDX-License-Identifier: Apache-2.0
"""The store over a file whose records are encoded: what is read is what was saved, or nothing.

It is long since what is encoded, damaged or recovered shares one rig.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Never

import numpy as np
import pytest
from blake3 import blake3

from attnstore_vllm.cli.main import EXIT_BAD, EXIT_OK, main
from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import ChunkName, State
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.io.aiofiles_device import AiofilesDevice
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.codec import CODECS, Lossless
from attnstore_vllm.io.device import CHECKSUM_BYTES
from attnstore_vllm.scheduler.figures import ERROR_EVENTS
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.format import (
    PAGE_BYTES,
    Encoding,
    Header,
    Root,
    SegmentHeader,
    header_checksum,
    judge_headers,
)
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.types import NVME, Key
from tests.encoded_helpers import Conversations
from tests.helpers import (
    CHUNK_TOKENS,
    PAYLOAD_BYTES,
    SHAPE,
    Rig,
    Start,
    capacity_for,
    name_of,
    names_of,
    payload_of,
    sequence_of,
    starting,
    tokens_of,
)
from tests.unit.policy.test_visits import Clock

LOSSLESS = CODECS["lossless"]
ENCODED = replace(SHAPE, encoding=Encoding("lossless", LOSSLESS.version, PAGE_BYTES))
NUM_RECORDS, DRAM_SLOTS = 12, 6


def small(name: ChunkName) -> bytes:
    """A payload of two pages, for which one page is enough: its bytes have few values."""
    return bytes(byte & 7 for byte in payload_of(name))


CONVERSATIONS = Conversations(small)
put_all, check_read = CONVERSATIONS.put_all, CONVERSATIONS.check_read


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path / "slab", ENCODED, NUM_RECORDS, DRAM_SLOTS) as start:
        yield start


def cold(rig: Rig) -> None:
    """Three conversations of 3 chunks; the first is on NVMe alone then."""
    for number in (1, 2, 3):
        put_all(rig, number)
    for name in names_of(sequence_of(tokens_of(1, 40))):
        chunk = rig.chunk(name)
        assert (chunk.dram.state, chunk.at(NVME).state) == (State.ABSENT, State.READY)


def damage_payload(path: Path, rig: Rig, number: int, payload: bytes | None = None) -> None:
    """Turn a bit of the payload of a conversation's first record; or put another one there, with
    right checksums, as a bug of the encoder would."""
    slot = rig.chunk(name_of(sequence_of(tokens_of(number, 40)), 0)).at(NVME).slot
    segment, offset = rig.slab.segment(slot), rig.slab.offset(slot)
    with (path / "slab").open("r+b") as file:
        file.seek(offset)
        raw = file.read(PAGE_BYTES)
        if payload is None:
            file.seek(offset + PAGE_BYTES + 100)
            byte = file.read(1)[0]
            file.seek(offset + PAGE_BYTES + 100)
            file.write(bytes([byte ^ 4]))
            return
        header = Header.decode(raw, slot, segment, "here")
        file.seek(offset)
        file.write(replace(header, payload_checksum=checksum(payload)).encode(CHUNK_TOKENS))
        file.write(payload)


def test_what_was_saved_comes_back(start: Start) -> None:
    rig = start()
    cold(rig)
    assert check_read(rig, 1) == 3
    counts = rig.store.figures().counts
    assert counts["written"] == 9
    assert "corrupt" not in counts
    assert "does_not_fit" not in counts


def test_more_records_have_room(start: Start) -> None:
    plain, encoded = start(SHAPE).slab, start().slab
    assert encoded.record_bytes == plain.record_bytes - PAGE_BYTES
    assert encoded.segment_bytes == plain.segment_bytes
    assert encoded.num_segments * encoded.records_per_segment >= NUM_RECORDS


def test_a_restart_recovers_the_bytes(start: Start) -> None:
    put_all(start(), 1)
    again = start()
    assert again.store.figures().counts["recovered"] == 3
    assert check_read(again, 1) == 3


@pytest.mark.parametrize(
    "other",
    [
        SHAPE,
        replace(ENCODED, encoding=Encoding("lossless", LOSSLESS.version + 1, PAGE_BYTES)),
        replace(ENCODED, encoding=Encoding("another", LOSSLESS.version, PAGE_BYTES)),
    ],
)
def test_records_of_another_codec_are_a_miss(
    start: Start, other: SegmentHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODECS, "another", LOSSLESS)
    put_all(start(), 1)
    again = start(other)
    assert "recovered" not in again.store.figures().counts
    assert check_read(again, 1) == 0
    put_all(again, 1)
    assert check_read(start(other), 1) == 3


def test_what_does_not_fit_stays_in_dram(start: Start) -> None:
    rig = start()
    sequence = sequence_of(tokens_of(1, 40))
    rig.put_all(sequence)  # bytes of all values
    rig.until_idle()
    counts = rig.store.figures().counts
    assert counts["does_not_fit"] == 3
    assert counts.keys().isdisjoint(ERROR_EVENTS)
    assert rig.check_read(sequence) == 3
    for number in (2, 3, 4, 5):  # the memory that writes take has come back
        put_all(rig, number)
    assert rig.store.figures().counts["written"] == 12
    assert start().read(sequence) == []


def test_what_is_worth_little_and_does_not_fit_is_tried_once(start: Start) -> None:
    rig = start()
    name = names_of(sequence_of(tokens_of(1, 40)))[0]
    chunk = rig.store.begin_save(name, low_value=True)
    assert chunk is not None
    rig.pool.slot(chunk.dram.slot)[:] = payload_of(name)  # bytes of all values
    rig.store.write_if_room(chunk)
    rig.store.finish_saves([chunk])
    rig.until(lambda: rig.store.figures().counts.get("does_not_fit", 0) > 0)
    rig.until_idle()
    time.sleep(0.1)
    assert rig.store.figures().counts["does_not_fit"] == 1


def test_what_does_not_fit_costs_no_writes_of_the_day(start: Start) -> None:
    """The budget of an hour is enough for three records."""
    clock = Clock()
    rig = start(daily_writes_bytes=3 * 24 * ENCODED.record_bytes, clock=clock)
    rig.put_all(sequence_of(tokens_of(1, 40)))  # bytes of all values
    clock.now += 3600.0
    rig.store.thread.wake()
    rig.until(lambda: rig.store.figures().counts.get("does_not_fit", 0) == 3)
    put_all(rig, 2)
    assert rig.store.figures().counts["written"] == 3


def test_damage_on_the_disk_is_a_miss(start: Start, tmp_path: Path) -> None:
    rig = start()
    cold(rig)
    damage_payload(tmp_path, rig, 1)
    assert check_read(rig, 1) == 0
    assert rig.store.figures().counts["corrupt"] == 1


def test_what_the_codec_does_not_take_is_a_miss(start: Start, tmp_path: Path) -> None:
    """Its checksums are right; a record of an encoder with a bug."""
    put_all(start(), 1)
    rig = start()
    damage_payload(tmp_path, rig, 1, bytes(CHECKSUM_BYTES) + b"\5" + bytes(PAGE_BYTES - 17))
    again = start()
    assert again.store.figures().counts["recovered"] == 3
    assert check_read(again, 1) == 0
    assert again.store.figures().counts["corrupt"] == 1


def turn_a_bit(data: memoryview) -> None:
    data[len(data) // 2] ^= 1


def test_a_decoder_that_makes_another_byte_is_a_miss(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = Lossless.unpack

    def wrong(codec: Lossless, packed: memoryview, out: memoryview) -> bool:
        taken = unpack(codec, packed, out)
        turn_a_bit(out)
        return taken

    rig = start()
    cold(rig)
    monkeypatch.setattr(Lossless, "unpack", wrong)
    assert check_read(rig, 1) == 0
    assert rig.store.figures().counts["corrupt"] == 3
    monkeypatch.undo()
    assert check_read(rig, 1) == 0, "the chunks are lost"


def test_an_encoder_that_makes_another_byte_is_a_miss(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All that is read has the record's checksum, and the codec takes it."""
    pack = Lossless.pack

    def wrong(
        codec: Lossless, payload: memoryview, out: memoryview, num_tokens: int, fast: bool
    ) -> int:
        other = bytearray(payload)
        turn_a_bit(memoryview(other))
        return pack(codec, memoryview(other), out, num_tokens, fast)

    with monkeypatch.context() as planted:
        planted.setattr(Lossless, "pack", wrong)
        put_all(start(), 1)
    rig = start()
    assert rig.store.figures().counts["recovered"] == 3
    assert main(["verify", str(tmp_path), "--json"]) == EXIT_BAD
    assert json.loads(capsys.readouterr().out)["bad"] == {"encoding": 3}
    assert check_read(rig, 1) == 0
    assert rig.store.figures().counts["corrupt"] == 3


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_a_codec_that_fails_costs_its_chunk(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> Never:
        raise error

    rig = start()
    cold(rig)
    with monkeypatch.context() as failing:
        failing.setattr(Lossless, "decode", fail)
        assert check_read(rig, 1) == 0
    assert rig.store.figures().counts["corrupt"] == 3
    with monkeypatch.context() as failing:
        failing.setattr(Lossless, "encode", fail)
        put_all(rig, 7)
    counts = rig.store.figures().counts
    assert counts["write_failed"] > 0
    assert "does_not_fit" not in counts
    for number in (8, 9, 10, 11):  # nothing of what reads and writes take is lost
        put_all(rig, number)
    assert check_read(rig, 8) == 3
    assert rig.store.is_idle()


def test_cold_records_are_read_again(start: Start, tmp_path: Path) -> None:
    put_all(start(), 1)
    rig = start()
    damage_payload(tmp_path, rig, 1)
    rig = start(scrub_bytes_per_s=1 << 30)
    rig.until(lambda: rig.store.figures().counts.get("scrubbed", 0) >= 2)
    rig.until(lambda: rig.store.figures().counts.get("corrupt", 0) == 1)


def test_the_command_line_knows_them(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = start()
    put_all(rig, 1)
    rig.close()
    assert main(["verify", str(tmp_path), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["good"] == 3
    assert main(["inspect", str(tmp_path), "--json"]) == EXIT_OK
    (namespace,) = json.loads(capsys.readouterr().out)
    assert namespace["codec"] == "lossless"
    assert namespace["bytes"] == 3 * ENCODED.record_bytes
    assert main(["inspect", str(tmp_path)]) == EXIT_OK
    assert "codec lossless" in capsys.readouterr().out
    damage_payload(tmp_path, rig, 1, bytes(CHECKSUM_BYTES) + b"\5" + bytes(PAGE_BYTES - 17))
    assert main(["verify", str(tmp_path), "--json"]) == EXIT_BAD
    assert json.loads(capsys.readouterr().out)["bad"] == {"encoding": 1}


def test_deleting_from_the_command_line_leaves_the_others(start: Start, tmp_path: Path) -> None:
    other = replace(ENCODED, namespace=b"o" * 32)
    put_all(start(), 1)
    put_all(start(other), 2)
    start(other).close()
    assert main(["gc", str(tmp_path), "--namespace", (b"o" * 32).hex(), "--yes"]) == EXIT_OK
    assert check_read(start(), 1) == 3
    assert check_read(start(other), 2) == 0


def test_a_store_that_ends_waits_for_its_codec(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decodes into a slot of DRAM is waited for."""
    rig = start()
    cold(rig)
    begun, has_ended = threading.Event(), threading.Event()
    decode = LOSSLESS.decode

    def slow(encoded: memoryview, out: memoryview) -> bool:
        begun.set()
        time.sleep(0.3)
        decoded = decode(encoded, out)
        has_ended.set()
        return decoded

    monkeypatch.setattr(LOSSLESS, "decode", slow)
    sequence = sequence_of(tokens_of(1, 16))
    assert rig.store.find(Lookup(sequence), 0, 16)
    assert begun.wait(10)
    rig.close()
    assert has_ended.is_set()


# ---- the format ------------------------------------------------------------------------------

SEGMENT = SegmentHeader(3, CHUNK_TOKENS, PAYLOAD_BYTES, b"n" * 32, b"g" * 16, 1_700_000_000, "a")
NAME = ChunkName(Key(b"k" * 32), Key(b"p" * 32), b"", b"t" * 32, 48, 3, encode_tokens([1, 2, 3]))
HEADER = Header(NAME, b"n" * 32, b"g" * 16, 5, 7, PAYLOAD_BYTES, b"c" * 16, 1_700_000_001)
IN_SEGMENT = replace(SEGMENT, encoding=Encoding("lossless", 1, PAGE_BYTES))
IN_RECORD = replace(HEADER, encoding=Encoding("lossless", 1, 3001))


def test_records_as_they_are_have_the_bytes_that_they_always_had() -> None:
    """The digest is of what the code wrote before there were codecs."""
    segment = replace(SEGMENT, label="a model")
    raw = Root(1 << 20).encode() + segment.encode() + HEADER.encode(CHUNK_TOKENS)
    assert blake3(raw).hexdigest() == (
        "76f064a9167d3d34300a27acca66fc0cf1a09d4a2043df4ca35f1091042c70e0"
    )


def test_headers_come_back() -> None:
    assert SegmentHeader.decode(IN_SEGMENT.encode(), 3, "here") == IN_SEGMENT
    raw = IN_RECORD.encode(CHUNK_TOKENS)
    assert Header.decode(raw, 5, IN_SEGMENT, "here") == IN_RECORD
    assert IN_RECORD.stored_bytes == PAGE_BYTES
    alone = replace(IN_RECORD, is_alone=True)
    assert Header.decode(alone.encode(CHUNK_TOKENS), 5, IN_SEGMENT, "here") == alone


@pytest.mark.parametrize(
    "encoding",
    [
        None,
        Encoding("lossles", 1, 3001),
        Encoding("lossless", 2, 3001),
        Encoding("lossless", 1, PAGE_BYTES + 1),
        Encoding("lossless", 1, 0),
    ],
)
def test_a_record_of_another_encoding_is_refused(encoding: Encoding | None) -> None:
    raw = replace(HEADER, encoding=encoding).encode(CHUNK_TOKENS)
    with pytest.raises(CorruptRecordError):
        Header.decode(raw, 5, IN_SEGMENT, "here")
    for segment, data in ((IN_SEGMENT, raw), (SEGMENT, IN_RECORD.encode(CHUNK_TOKENS))):
        good, _ = judge_headers(memoryview(data), np.array([5]), segment, header_checksum(data))
        assert not good.any()


def test_recovery_takes_what_decoding_takes() -> None:
    raw = IN_RECORD.encode(CHUNK_TOKENS)
    good, damaged = judge_headers(memoryview(raw), np.array([5]), IN_SEGMENT, header_checksum(raw))
    assert good.all()
    assert not damaged.any()


def test_there_is_room_for_the_encoding_behind_all_tokens() -> None:
    """264 bytes of fields and 32 of the encoding go into a page with 950 tokens, not with more."""
    for tokens, num_pages in ((950, 1), (951, 2), (958, 2)):
        assert replace(IN_SEGMENT, chunk_tokens=tokens).header_bytes == num_pages * PAGE_BYTES
    assert replace(SEGMENT, chunk_tokens=958).header_bytes == PAGE_BYTES


def test_a_device_of_threads_serves_too(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab", capacity_for(NUM_RECORDS), ENCODED)
    rig = Rig(AiofilesDevice(tmp_path / "slab", 4), slab, DRAM_SLOTS)
    cold(rig)
    assert check_read(rig, 1) == 3
    rig.close()
