# SPDX-License-Identifier: Apache-2.0
"""The bytes of a slab: what is written is what is read, and any other byte is noticed."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.store.format import (
    PAGE_BYTES,
    VERSION,
    Header,
    Superblock,
    checksum,
    header_bytes,
    pages,
)
from attnstore_vllm.types import Key

CHUNK_TOKENS = 16
SUPERBLOCK = Superblock(CHUNK_TOKENS, 8192, b"n" * 32, b"g" * 16)
KEYS = st.binary(min_size=32, max_size=32)
FIELDS = {  # name: (first byte, bytes), as the picture in store/format.py says
    "magic": (0, 8),
    "version": (8, 4),
    "number of tokens": (12, 4),
    "checksum": (16, 16),
    "generation": (32, 16),
    "record number": (48, 8),
    "sequence": (56, 8),
    "payload bytes": (64, 8),
    "payload checksum": (72, 16),
    "key": (88, 32),
    "parent": (120, 32),
    "extra": (152, 32),
    "tenant": (184, 32),
    "position": (216, 8),
    "tokens": (224, 4 * CHUNK_TOKENS),
    "padding": (224 + 4 * CHUNK_TOKENS, PAGE_BYTES - 224 - 4 * CHUNK_TOKENS),
}

names = st.builds(
    ChunkName,
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
    sequence=st.integers(0, 2**64 - 1),
    payload_bytes=st.just(SUPERBLOCK.payload_bytes),
    payload_checksum=st.binary(min_size=16, max_size=16),
)
NAME = ChunkName(Key(b"k" * 32), Key(b"p" * 32), b"", b"t" * 32, 48, 3, encode_tokens([1, 2, 3]))
HEADER = Header(NAME, 7, SUPERBLOCK.payload_bytes, b"c" * 16)


def decode(raw: bytes, record: int = 5) -> Header:
    return Header.decode(raw, record, SUPERBLOCK, "here")


def encode(header: Header = HEADER, record: int = 5) -> bytes:
    return header.encode(record, SUPERBLOCK.generation, CHUNK_TOKENS)


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


@given(headers, st.integers(0, 2**63))
def test_headers_round_trip(header: Header, record: int) -> None:
    raw = encode(header, record)
    assert len(raw) == header_bytes(CHUNK_TOKENS)
    assert decode(raw, record) == header


@given(
    st.builds(
        Superblock,
        chunk_tokens=st.integers(0, 2**32 - 1),
        payload_bytes=st.integers(0, 2**64 - 1),
        namespace=KEYS,
        generation=st.binary(min_size=16, max_size=16),
    )
)
def test_superblocks_round_trip(superblock: Superblock) -> None:
    raw = superblock.encode()
    assert len(raw) == PAGE_BYTES
    assert Superblock.decode(raw, "here") == superblock


def test_golden_bytes() -> None:
    """If this fails, raise VERSION: an old file must be a miss, never a guess."""
    assert VERSION == 1
    assert checksum(encode()).hex() == "1dff1492ec40d5c4353085def2552ddb"
    assert checksum(SUPERBLOCK.encode()).hex() == "aac28d4f25825343ace63d5f8a7f8760"


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
def test_a_changed_bit_in_the_superblock_is_noticed(byte: int, bit: int) -> None:
    raw = bytearray(SUPERBLOCK.encode())
    raw[byte] ^= 1 << bit
    with pytest.raises(CorruptRecordError):
        Superblock.decode(bytes(raw), "here")


@given(headers, headers, st.integers(1, 7))
def test_a_torn_header_is_noticed(old: Header, new: Header, sectors: int) -> None:
    """Of a header of several sectors some are new and some are old, or were never written."""
    chunk_tokens = 1024
    superblock = replace(SUPERBLOCK, chunk_tokens=chunk_tokens)
    olds = old.encode(5, superblock.generation, chunk_tokens)
    news = new.encode(5, superblock.generation, chunk_tokens)
    assert len(news) == 2 * PAGE_BYTES
    at = sectors * 512
    for torn in (news[:at] + olds[at:], news[:at] + bytes(len(news) - at)):
        if torn in (olds, news):
            continue
        with pytest.raises(CorruptRecordError):
            Header.decode(torn, 5, superblock, "here")


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
    before_reset = HEADER.encode(5, b"G" * 16, CHUNK_TOKENS)
    assert corrupt_field(before_reset) == "generation"
    assert corrupt_field(encode(replace(HEADER, payload_bytes=4096))) == "payload bytes"


@pytest.mark.parametrize("num_tokens", [0, CHUNK_TOKENS + 1, 2**32 - 1])
def test_a_number_of_tokens_that_no_chunk_has(num_tokens: int) -> None:
    raw = bytearray(encode())
    raw[12:16] = struct.pack("<I", num_tokens)
    assert corrupt_field(resealed(raw)) == "number of tokens within a chunk"


def test_an_old_version_is_named_before_its_checksum_is_trusted() -> None:
    raw = bytearray(SUPERBLOCK.encode())
    raw[8:12] = struct.pack("<I", VERSION + 1)
    with pytest.raises(CorruptRecordError, match="version"):
        Superblock.decode(resealed(raw), "here")


def test_what_cannot_be_encoded_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        encode(replace(HEADER, payload_checksum=b"short"))
    with pytest.raises(AssertionError):
        encode(replace(HEADER, name=replace(NAME, extra=b"short")))
    with pytest.raises(AssertionError):
        encode(replace(HEADER, name=replace(NAME, tokens=bytes(4 * CHUNK_TOKENS + 4))))
    with pytest.raises(AssertionError):
        replace(SUPERBLOCK, namespace=b"short").encode()


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (8192, 8192)]
)
def test_pages(num_bytes: int, rounded: int) -> None:
    assert pages(num_bytes) == rounded


def test_headers_grow_by_whole_pages() -> None:
    assert header_bytes(256) == PAGE_BYTES
    assert header_bytes((PAGE_BYTES - 224) // 4) == PAGE_BYTES
    assert header_bytes((PAGE_BYTES - 224) // 4 + 1) == 2 * PAGE_BYTES
