# SPDX-License-Identifier: Apache-2.0
"""The bytes of a slab: what is written is what is read, and any other byte is noticed."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm._native import record_offsets
from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.tiers.nvme.format import (
    CHUNK_TOKENS_MAX,
    PAGE_BYTES,
    SECONDS_MAX,
    SEGMENT_BYTES_MAX,
    TIME_MAX,
    VERSION,
    Encoding,
    Header,
    Root,
    SegmentHeader,
    header_bytes,
    header_checksum,
    judge_headers,
    pages,
)
from attnstore_vllm.types import Key

CHUNK_TOKENS = 16
SEGMENT = SegmentHeader(3, CHUNK_TOKENS, 8192, b"n" * 32, b"g" * 16, 1_700_000_000, "a model")
KEYS = st.binary(min_size=32, max_size=32)
FIELDS = {  # name: (first byte, bytes), as the picture in tiers/nvme/format.py says
    "magic": (0, 8),
    "version": (8, 4),
    "number of tokens": (12, 4),
    "checksum": (16, 16),
    "generation": (32, 16),
    "record number": (48, 8),
    "sequence": (56, 8),
    "payload bytes": (64, 8),
    "payload checksum": (72, 16),
    "namespace": (88, 32),
    "key": (120, 32),
    "parent": (152, 32),
    "extra": (184, 32),
    "tenant": (216, 32),
    "position": (248, 8),
    "written at": (256, 8),
    "tokens": (264, 4 * CHUNK_TOKENS),
    "padding": (264 + 4 * CHUNK_TOKENS, PAGE_BYTES - 308 - 4 * CHUNK_TOKENS),
    "unused": (PAGE_BYTES - 44, 4),
    "ttl": (PAGE_BYTES - 40, 4),
    "flags": (PAGE_BYTES - 36, 4),
    "place of an encoding": (PAGE_BYTES - 32, 32),
}


def chunk_name(**fields: Any) -> ChunkName:
    return ChunkName(num_tokens=len(fields["tokens"]) // 4, **fields)


names = st.builds(
    chunk_name,
    key=KEYS.map(Key),
    parent=KEYS.map(Key),
    extra=st.one_of(st.just(b""), KEYS.filter(any)),
    tenant=KEYS,
    position=st.integers(0, 2**64 - 1),
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=CHUNK_TOKENS).map(
        encode_tokens
    ),
)
headers = st.builds(
    Header,
    name=names,
    namespace=st.just(SEGMENT.namespace),
    generation=st.just(SEGMENT.generation),
    record=st.just(5),
    sequence=st.integers(0, 2**64 - 1),
    payload_bytes=st.just(SEGMENT.payload_bytes),
    payload_checksum=st.binary(min_size=16, max_size=16),
    written_at=st.integers(0, 2**64 - 1),
    is_alone=st.booleans(),
    unused_s=st.integers(0, SECONDS_MAX),
    ttl_s=st.integers(0, SECONDS_MAX),
)
NAME = ChunkName(Key(b"k" * 32), Key(b"p" * 32), b"", b"t" * 32, 48, 3, encode_tokens([1, 2, 3]))
HEADER = Header(NAME, b"n" * 32, b"g" * 16, 5, 7, SEGMENT.payload_bytes, b"c" * 16, 1_700_000_001)


def decode(raw: bytes, record: int = 5) -> Header:
    return Header.decode(raw, record, SEGMENT, "here")


def encode(header: Header = HEADER) -> bytes:
    return header.encode(CHUNK_TOKENS)


def resealed(raw: bytearray) -> bytes:
    """The bytes with a checksum that fits: what a bug of ours, not the disk, would write."""
    blank = bytearray(raw)
    blank[16:32] = bytes(16)
    blank[16:32] = checksum(blank)
    return bytes(blank)


def test_the_fields_fill_the_header() -> None:
    ends = [first + length for first, length in FIELDS.values()]
    assert ends[:-1] == [first for first, _ in list(FIELDS.values())[1:]]
    assert ends[-1] == header_bytes(CHUNK_TOKENS) == PAGE_BYTES


def test_the_native_reader_of_headers_looks_where_the_fields_are() -> None:
    """Each field is found by bytes that no other has."""

    def some(first: int, count: int) -> bytes:
        return bytes(range(first, first + count))

    name = ChunkName(
        Key(some(1, 32)), Key(some(33, 32)), some(65, 32), some(97, 32), 0x7177, 3, some(129, 12)
    )
    fields = {
        "num_tokens": (3).to_bytes(4, "little"), "sequence": (0x5152535455).to_bytes(8, "little"),
        "payload_checksum": some(161, 16), "key": name.key, "parent": name.parent,
        "extra": name.extra, "tenant": name.tenant, "position": (0x7177).to_bytes(8, "little"),
        "tokens": name.tokens, "flags": (1).to_bytes(4, "little"),
    }  # fmt: skip
    header = Header(
        name, bytes(32), bytes(16), 1, 0x5152535455, 4096, some(161, 16), 9, is_alone=True
    )
    raw = header.encode(16)
    assert record_offsets.keys() == fields.keys()
    for field, at in record_offsets.items():
        first = at % len(raw)
        assert raw[first : first + len(fields[field])] == fields[field], field


@given(headers, st.integers(0, 2**63))
def test_headers_round_trip(header: Header, record: int) -> None:
    header = replace(header, record=record)
    raw = encode(header)
    assert len(raw) == header_bytes(CHUNK_TOKENS)
    assert decode(raw, record) == header
    used = memoryview(bytearray(b"\xff" * len(raw)))  # a page that held another header
    header.encode_into(used)
    assert resealed(bytearray(used)) == raw


segments = st.builds(
    SegmentHeader,
    number=st.integers(0, 2**64 - 1),
    chunk_tokens=st.integers(1, CHUNK_TOKENS_MAX),
    payload_bytes=st.integers(1, SEGMENT_BYTES_MAX // PAGE_BYTES).map(PAGE_BYTES.__mul__),
    namespace=KEYS,
    generation=st.binary(min_size=16, max_size=16),
    last_used=st.integers(0, TIME_MAX),
    label=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=60),
)


@given(segments)
def test_segment_headers_round_trip(segment: SegmentHeader) -> None:
    raw = segment.encode()
    assert len(raw) == PAGE_BYTES
    assert not raw[512:].strip(b"\0"), "one sector, so that it is rewritten whole or not at all"
    assert SegmentHeader.decode(raw, segment.number, "here") == segment


def test_a_long_label_is_cut_between_characters() -> None:
    long = replace(SEGMENT, label="x" + "\u00e9" * 200)
    assert SegmentHeader.decode(long.encode(), 3, "here").label == "x" + "\u00e9" * 127


@given(st.integers(2, SEGMENT_BYTES_MAX // PAGE_BYTES).map(PAGE_BYTES.__mul__))
def test_roots_round_trip(segment_bytes: int) -> None:
    assert Root.decode(Root(segment_bytes).encode(), "here") == Root(segment_bytes)


@pytest.mark.parametrize("segment_bytes", [0, 1, 4095, 4096, 4097, 2**50 + 4096, 2**60, 2**63])
def test_a_root_whose_segments_cannot_be(segment_bytes: int) -> None:
    with pytest.raises(CorruptRecordError, match="segment"):
        Root.decode(Root(segment_bytes).encode(), "here")


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_tokens": 0},
        {"chunk_tokens": 2**31},
        {"payload_bytes": 0},
        {"payload_bytes": 4097},
        {"payload_bytes": 2**60},
        {"last_used": 2**63},
        {"encoding": Encoding("lossless", 1, 0)},
        {"encoding": Encoding("lossless", 1, 2**60)},
        {"encoding": Encoding("lossless", 1, 4096), "payload_bytes": 2**40},
        {"encoding": Encoding("\x1b[2J", 1, 4096)},
    ],
)
def test_a_segment_whose_numbers_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptRecordError):
        SegmentHeader.decode(replace(SEGMENT, **change).encode(), 3, "here")


def test_a_label_is_shown_without_what_moves_a_cursor_or_turns_the_line() -> None:
    label = "a\x1b[2Jb\nc\u202ed \u00e9\u4e2d"
    found = SegmentHeader.decode(replace(SEGMENT, label=label).encode(), 3, "here").label
    assert found == "a\\x1b[2Jb\\nc\\u202ed \u00e9\u4e2d"


def test_golden_bytes() -> None:
    """If this fails, raise VERSION: an old file must be a miss, never a guess."""
    assert VERSION == 2
    assert checksum(encode()).hex() == "5d4de62b414f8daaea2c11a49ffa1a1e"
    assert checksum(SEGMENT.encode()).hex() == "e03c0dd59072f5d11739d0094266af18"
    assert checksum(Root(1 << 30).encode()).hex() == "5c471a80940242c8f789094354b33ec3"


@given(st.lists(headers, min_size=1, max_size=8), st.data())
def test_many_headers_are_judged_as_each_alone(many: list[Header], data: st.DataObject) -> None:
    raw = bytearray()
    for number, header in enumerate(many):
        page = bytearray(encode(replace(header, record=number)))
        if data.draw(st.booleans()):
            at = data.draw(st.one_of(st.integers(0, 400), st.integers(0, len(page) - 1)))
            page[at] ^= 1 << data.draw(st.integers(0, 7))
            page = bytearray(resealed(page)) if data.draw(st.booleans()) else page
        raw += page
    pages_of = [bytes(raw[i : i + PAGE_BYTES]) for i in range(0, len(raw), PAGE_BYTES)]
    checksums = b"".join(header_checksum(page) for page in pages_of)
    numbers = np.arange(len(many), dtype=np.int64)
    good, damaged = judge_headers(memoryview(raw), numbers, SEGMENT, checksums)
    for number, one in enumerate(pages_of):
        wrong = ""
        try:
            decode(one, number)
        except CorruptRecordError as error:
            wrong = error.field
        assert good[number] == (not wrong)
        assert damaged[number] == (wrong not in ("", "magic", "version", "generation"))


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=10)
@given(header=headers, data=st.data())
def test_a_changed_bit_in_any_field_is_noticed(
    field: str, header: Header, data: st.DataObject
) -> None:
    first, length = FIELDS[field]
    raw = bytearray(encode(header))
    raw[data.draw(st.integers(first, first + length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptRecordError):
        decode(bytes(raw))


@given(st.integers(0, PAGE_BYTES - 1), st.integers(0, 7))
@settings(max_examples=200)
def test_a_changed_bit_in_root_or_segment_header_is_noticed(byte: int, bit: int) -> None:
    root, segment = bytearray(Root(1 << 20).encode()), bytearray(SEGMENT.encode())
    root[byte] ^= 1 << bit
    segment[byte] ^= 1 << bit
    with pytest.raises(CorruptRecordError):
        Root.decode(bytes(root), "here")
    with pytest.raises(CorruptRecordError):
        SegmentHeader.decode(bytes(segment), 3, "here")


def test_a_misplaced_segment_header_is_noticed() -> None:
    with pytest.raises(CorruptRecordError, match="segment number"):
        SegmentHeader.decode(SEGMENT.encode(), 4, "here")


@given(headers, headers, st.integers(1, 7))
def test_a_torn_header_is_noticed(old: Header, new: Header, sectors: int) -> None:
    """Of a header of several sectors some are new and some are old, or were never written."""
    chunk_tokens = 1024
    segment = replace(SEGMENT, chunk_tokens=chunk_tokens)
    olds, news = old.encode(chunk_tokens), new.encode(chunk_tokens)
    assert len(news) == 2 * PAGE_BYTES
    at = sectors * 512
    for torn in (news[:at] + olds[at:], news[:at] + bytes(len(news) - at)):
        if torn in (olds, news):
            continue
        with pytest.raises(CorruptRecordError):
            Header.decode(torn, 5, segment, "here")


def corrupt_field(raw: bytes, record: int = 5) -> str:
    with pytest.raises(CorruptRecordError) as caught:
        decode(raw, record)
    assert "here" in str(caught.value)
    assert "prefilled again" in str(caught.value)
    return caught.value.field


def test_the_error_names_the_first_field_that_is_wrong() -> None:
    assert corrupt_field(bytes(PAGE_BYTES)) == "magic"
    raw = bytearray(encode())
    raw[8:12] = struct.pack("<I", VERSION + 1)
    assert corrupt_field(bytes(raw)) == "version"
    raw = bytearray(encode())
    raw[100] ^= 1
    assert corrupt_field(bytes(raw)) == "header checksum"
    assert corrupt_field(encode(), record=6) == "record number"
    assert corrupt_field(encode(replace(HEADER, generation=b"G" * 16))) == "generation"
    assert corrupt_field(encode(replace(HEADER, namespace=b"N" * 32))) == "namespace"
    assert corrupt_field(encode(replace(HEADER, payload_bytes=4096))) == "payload bytes"


@pytest.mark.parametrize("num_tokens", [0, CHUNK_TOKENS + 1, 2**32 - 1])
def test_a_number_of_tokens_that_no_chunk_has(num_tokens: int) -> None:
    raw = bytearray(encode())
    raw[12:16] = struct.pack("<I", num_tokens)
    assert corrupt_field(resealed(raw)) == "number of tokens within a chunk"


def test_an_old_version_is_named_before_its_checksum_is_trusted() -> None:
    raw = bytearray(Root(1 << 20).encode())
    raw[8:12] = struct.pack("<I", VERSION + 1)
    with pytest.raises(CorruptRecordError, match="version"):
        Root.decode(resealed(raw), "here")


def test_what_cannot_be_encoded_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        encode(replace(HEADER, payload_checksum=b"short"))
    with pytest.raises(AssertionError):
        encode(replace(HEADER, name=replace(NAME, extra=b"short")))
    with pytest.raises(AssertionError):
        encode(
            replace(
                HEADER,
                name=replace(NAME, num_tokens=CHUNK_TOKENS + 1, tokens=bytes(4 * CHUNK_TOKENS + 4)),
            )
        )
    with pytest.raises(AssertionError):
        replace(SEGMENT, namespace=b"short").encode()


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (8192, 8192)]
)
def test_pages(num_bytes: int, rounded: int) -> None:
    assert pages(num_bytes) == rounded


def test_headers_grow_by_whole_pages() -> None:
    assert header_bytes(256) == PAGE_BYTES
    assert header_bytes((PAGE_BYTES - 264) // 4) == PAGE_BYTES
    assert header_bytes((PAGE_BYTES - 264) // 4 + 1) == 2 * PAGE_BYTES
