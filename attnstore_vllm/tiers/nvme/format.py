# SPDX-License-Identifier: Apache-2.0
"""Byte layout of the slab file, version 2. The prose version is docs/format.md; keep both in step.

It is long since each field is written, read and bounded in one place.

0                                    root, one page
4096 + s * segment_bytes             segment s: its header, one page,
... + 4096 + i * record_bytes        then its records; a record = header pages + payload

root                               segment header                     record header
offset bytes field                 offset bytes field                 offset bytes field
     0     8 magic b"ATTNSLAB"          0     8 magic b"ATTNSEGM"          0     8 magic b"ATTNKV\\r\\n"
     8     4 version                    8     4 version                    8     4 version
    12     4 zero                      12     4 chunk tokens              12     4 number of tokens
    16    16 checksum                  16    16 checksum                  16    16 checksum
    32     8 segment bytes             32    16 generation                32    16 generation
                                       48     8 segment number            48     8 record number
                                       56     8 payload bytes             56     8 sequence
                                       64    32 namespace                 64     8 payload bytes
                                       96     8 last used, unix s         72    16 checksum of the payload
                                      104   256 label, UTF-8              88    32 namespace
                                                                         120    32 key
All pages end in zeros. A checksum is XXH3-128 of the whole header       152    32 parent key
with the checksum's own field zero, or of the payload. Integers are      184    32 extra, or zero
little-endian, token ids and checksums big-endian.                       216    32 tenant, or zero
                                                                         248     8 position
                                                                         256     8 written at, unix s
                                                                         264   4*n token ids
                                                                         -44     4 unused, s
                                                                         -40     4 ttl, s, or zero
                                                                         -36     4 flags: 1 is alone
Version 3 is the same, of payloads that a codec has encoded. A segment's encoding is at 360, a
record's in the last 32 bytes of its header: 16 name, 4 version, 4 zero, 8 bytes of a place or of
the encoded payload. The payload's checksum is that of what is on the disk, which begins with the
checksum of the payload before encoding.
"""  # noqa: E501 (a picture)

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.device import CHECKSUM_BYTES
from attnstore_vllm.plain_text import printable
from attnstore_vllm.types import KEY_BYTES, TOKEN_BYTES, Key

VERSION = 2
ENCODED_VERSION = 3
"""The version of segments and records whose payloads are encoded. The root's stays 2."""
PAGE_BYTES = 4096
GENERATION_BYTES = 16
LABEL_BYTES = 256
SEGMENT_BYTES_MAX = 1 << 50
CHUNK_TOKENS_MAX = 1 << 16
EXPANSION_MAX = 16
"""A payload has at most so many times the bytes of its place on the disk: a reader must have room
for it."""
TIME_MAX = 1 << 37
"""Unix time, seconds: in the year 6325. Much later ones are none that a calendar can show."""
CHECKSUM_AT = 16
PAYLOAD_CHECKSUM_AT = 72
_CHECKSUM = slice(CHECKSUM_AT, CHECKSUM_AT + CHECKSUM_BYTES)
_ROOT = struct.Struct("<8sII16sQ")
_SEGMENT = struct.Struct("<8sII16s16sQQ32sQ256s")
_HEADER = struct.Struct("<8sII16s16sQQQ16s32s32s32s32s32sQQ")
_ENCODING = struct.Struct("<16sIIQ")
_AGE = struct.Struct("<II")
SECONDS_MAX = (1 << 32) - 1
ROOT_MAGIC = b"ATTNSLAB"
SEGMENT_MAGIC = b"ATTNSEGM"
HEADER_MAGIC = b"ATTNKV\r\n"
_FLAGS = slice(-36, -32)
"""Bytes of a record's header with its flags: right before its encoding, or where that would be."""
_IS_ALONE = 1
_TENANT_AT = 216
_WRITTEN_AT = 256
_AGE_AT = -44
"""How long it was unused when it was written, and its own ttl: right before the flags. Zeros in
records of earlier builds, and where neither is known."""
assert _SEGMENT.size == 360  # within one sector, so that it is rewritten whole or not at all
assert _SEGMENT.size + _ENCODING.size <= 512
assert _HEADER.size == 264


def pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def header_bytes(chunk_tokens: int) -> int:
    """Bytes of a record's header."""
    return pages(_HEADER.size + chunk_tokens * TOKEN_BYTES)


class Encoding(NamedTuple):
    """How a payload lies on the disk."""

    codec: str
    version: int
    """The codec's."""
    num_bytes: int
    """In a segment: room for a payload, in whole pages. In a record: its own encoded payload."""

    def encode(self) -> bytes:
        name = self.codec.encode()
        assert 0 < len(name) <= 16
        return _ENCODING.pack(name, self.version, 0, self.num_bytes)

    @classmethod
    def decode(cls, raw: bytes) -> Encoding:
        name, version, _, num_bytes = _ENCODING.unpack(raw)
        return cls(name.rstrip(b"\0").decode(errors="replace"), version, num_bytes)


def seal(raw: bytearray) -> bytes:
    """The header with its checksum in place."""
    assert raw[_CHECKSUM] == bytes(CHECKSUM_BYTES)
    raw[_CHECKSUM] = checksum(raw)
    return bytes(raw)


def header_checksum(raw: bytes | memoryview) -> bytes:
    """The checksum that a header should state."""
    blank = bytearray(raw)
    blank[_CHECKSUM] = bytes(CHECKSUM_BYTES)
    return checksum(blank)


def _check(where: str, fields: tuple[tuple[str, object, object], ...]) -> None:
    for field, want, got in fields:
        if want != got:
            raise CorruptRecordError(where, field, want, got)


def _fits(num_bytes: int, most: int) -> bool:
    """Whether it is whole pages, one at least."""
    return 0 < num_bytes <= most and num_bytes % PAGE_BYTES == 0


@dataclass(frozen=True, slots=True)
class Root:
    """The page that says what the whole file has in common."""

    segment_bytes: int

    def encode(self) -> bytes:
        raw = bytearray(PAGE_BYTES)
        _ROOT.pack_into(raw, 0, ROOT_MAGIC, VERSION, 0, bytes(CHECKSUM_BYTES), self.segment_bytes)
        return seal(raw)

    @classmethod
    def decode(cls, raw: bytes, where: str) -> Root:
        """Raises CorruptRecordError on the first field that is not ours."""
        magic, version, _, digest, segment_bytes = _ROOT.unpack_from(raw)
        _check(
            where,
            (
                ("magic", ROOT_MAGIC, magic),
                ("version", VERSION, version),
                ("checksum", header_checksum(raw), digest),
                ("whole pages of a segment", True, _fits(segment_bytes, SEGMENT_BYTES_MAX)),
                ("segment bytes for a header and a record", True, segment_bytes > PAGE_BYTES),
            ),
        )
        return cls(segment_bytes)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The page that says what all records of a segment have in common. A segment belongs to one
    namespace."""

    number: int
    chunk_tokens: int
    payload_bytes: int
    namespace: bytes
    generation: bytes
    """Random, new with every claim and reset: makes all records of before invalid at once."""
    last_used: int
    """Unix time, seconds, of the last start of a server with this namespace."""
    label: str
    """For people: the model's name and shape."""
    encoding: Encoding | None = None
    """None: payloads are stored as they are."""

    @property
    def version(self) -> int:
        return VERSION if self.encoding is None else ENCODED_VERSION

    @property
    def header_bytes(self) -> int:
        """Bytes of a record's header."""
        if self.encoding is None:
            return header_bytes(self.chunk_tokens)
        return pages(_HEADER.size + self.chunk_tokens * TOKEN_BYTES + _ENCODING.size)

    @property
    def record_bytes(self) -> int:
        room = self.payload_bytes if self.encoding is None else self.encoding.num_bytes
        return self.header_bytes + pages(room)

    def encode(self) -> bytes:
        assert len(self.namespace) == KEY_BYTES
        assert len(self.generation) == GENERATION_BYTES
        label = self.label.encode()[:LABEL_BYTES].decode(errors="ignore").encode()
        raw = bytearray(PAGE_BYTES)
        _SEGMENT.pack_into(
            raw,
            0,
            SEGMENT_MAGIC,
            self.version,
            self.chunk_tokens,
            bytes(CHECKSUM_BYTES),
            self.generation,
            self.number,
            self.payload_bytes,
            self.namespace,
            self.last_used,
            label,
        )
        if self.encoding is not None:
            raw[_SEGMENT.size : _SEGMENT.size + _ENCODING.size] = self.encoding.encode()
        return seal(raw)

    @classmethod
    def decode(cls, raw: bytes, number: int, where: str) -> SegmentHeader:
        """Raises CorruptRecordError on the first field that is not ours."""
        (
            magic,
            version,
            chunk_tokens,
            digest,
            generation,
            found,
            payload_bytes,
            namespace,
            last_used,
            label,
        ) = _SEGMENT.unpack_from(raw)
        is_encoded = version == ENCODED_VERSION
        _check(
            where,
            (
                ("magic", SEGMENT_MAGIC, magic),
                ("version", ENCODED_VERSION if is_encoded else VERSION, version),
                ("checksum", header_checksum(raw), digest),
                ("segment number", number, found),
            ),
        )
        text = printable(label.rstrip(b"\0").decode(errors="replace"))
        at = _SEGMENT.size
        encoding = Encoding.decode(raw[at : at + _ENCODING.size]) if is_encoded else None
        made = cls(
            number, chunk_tokens, payload_bytes, namespace, generation, last_used, text, encoding
        )
        _check(where, made._ranges())
        return made

    def _ranges(self) -> tuple[tuple[str, object, object], ...]:
        """Fields whose numbers a reader multiplies, allocates or shows."""
        room, codec = self.payload_bytes, "none"
        if self.encoding is not None:
            room, codec = self.encoding.num_bytes, self.encoding.codec
        return (
            ("chunk tokens in their range", True, 0 < self.chunk_tokens <= CHUNK_TOKENS_MAX),
            ("place of a payload in whole pages", True, _fits(room, SEGMENT_BYTES_MAX)),
            ("payload bytes", True, 0 < self.payload_bytes <= EXPANSION_MAX * room),
            ("last used in its range", True, self.last_used <= TIME_MAX),
            ("codec", True, bool(codec) and codec.isascii() and codec.isprintable()),
        )


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one record."""

    name: ChunkName
    namespace: bytes
    generation: bytes
    record: int
    sequence: int
    payload_bytes: int
    payload_checksum: bytes
    """Zero when encoded for the device to fill in (io.device.Seal)."""
    written_at: int
    """Unix time, seconds."""
    encoding: Encoding | None = None
    is_alone: bool = False
    """See index/chunk.py: Chunk. It stays where a longer record has all its tokens."""
    unused_s: int = 0
    """Seconds since its last use, when it was written."""
    ttl_s: int = 0
    """It is not found after so many seconds without use; 0: it has no such time of its own."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payload on the disk, in whole pages."""
        return pages(self.payload_bytes if self.encoding is None else self.encoding.num_bytes)

    def encode_into(self, raw: memoryview) -> None:
        """Write the header, both checksums as they are in it: its own is zero."""
        name = self.name
        assert len(self.payload_checksum) == CHECKSUM_BYTES
        assert len(name.extra) in (0, KEY_BYTES)
        end = _HEADER.size + len(name.tokens)
        _HEADER.pack_into(
            raw,
            0,
            HEADER_MAGIC,
            VERSION if self.encoding is None else ENCODED_VERSION,
            name.num_tokens,
            bytes(CHECKSUM_BYTES),
            self.generation,
            self.record,
            self.sequence,
            self.payload_bytes,
            self.payload_checksum,
            self.namespace,
            name.key,
            name.parent,
            name.extra.ljust(KEY_BYTES, b"\0"),
            name.tenant,
            name.position,
            self.written_at,
        )
        raw[_HEADER.size : end] = name.tokens
        raw[end:] = bytes(len(raw) - end)
        if self.is_alone:
            assert end <= len(raw) + _FLAGS.start
            raw[_FLAGS] = _IS_ALONE.to_bytes(4, "little")
        if self.unused_s or self.ttl_s:
            assert end <= len(raw) + _AGE_AT
            _AGE.pack_into(raw, len(raw) + _AGE_AT, self.unused_s, self.ttl_s)
        if self.encoding is not None:
            raw[-_ENCODING.size :] = self.encoding.encode()

    def encode(self, chunk_tokens: int) -> bytes:
        """The whole header, sealed."""
        assert self.name.num_tokens <= chunk_tokens
        raw = bytearray(header_bytes(chunk_tokens))
        self.encode_into(memoryview(raw))
        return seal(raw)

    @classmethod
    def decode(cls, raw: bytes, record: int, segment: SegmentHeader, where: str) -> Header:
        """Raises CorruptRecordError on the first field that is not what the segment expects."""
        (
            magic,
            version,
            num_tokens,
            digest,
            generation,
            number,
            sequence,
            size,
            payload_digest,
            namespace,
            key,
            parent,
            extra,
            tenant,
            position,
            written_at,
        ) = _HEADER.unpack_from(raw)
        in_range = 0 < num_tokens <= segment.chunk_tokens
        _check(
            where,
            (
                ("magic", HEADER_MAGIC, magic),
                ("version", segment.version, version),
                ("generation", segment.generation, generation),
                ("header checksum", header_checksum(raw), digest),
                ("record number", record, number),
                ("namespace", segment.namespace, namespace),
                ("payload bytes", segment.payload_bytes, size),
                ("number of tokens within a chunk", True, in_range),
            ),
        )
        tokens = raw[_HEADER.size : _HEADER.size + num_tokens * TOKEN_BYTES]
        extra = b"" if extra == bytes(KEY_BYTES) else extra
        encoding = None
        if segment.encoding is not None:
            encoding = Encoding.decode(raw[-_ENCODING.size :])
            _check_encoding(where, segment.encoding, encoding)
        name = ChunkName(Key(key), Key(parent), extra, tenant, position, num_tokens, tokens)
        unused_s, ttl_s = _AGE.unpack_from(raw, len(raw) + _AGE_AT)
        return cls(
            name,
            namespace,
            generation,
            number,
            sequence,
            size,
            payload_digest,
            written_at,
            encoding,
            bool(int.from_bytes(raw[_FLAGS], "little") & _IS_ALONE),
            unused_s,
            ttl_s,
        )


def _check_encoding(where: str, want: Encoding, got: Encoding) -> None:
    fits = 0 < got.num_bytes <= want.num_bytes
    _check(
        where,
        (
            ("codec and its version", want[:2], got[:2]),
            ("encoded bytes within their place", True, fits),
        ),
    )


_FIELDS = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "num_tokens",
            "checksum",
            "generation",
            "record",
            "payload_bytes",
            "namespace",
        ],
        "formats": ["V8", "<u4", "<u4", "V16", "V16", "<u8", "<u8", "V32"],
        "offsets": [0, 8, 12, 16, 32, 48, 64, 88],
        "itemsize": _HEADER.size,
    }
)


def judge_headers(
    raw: memoryview, records: npt.NDArray[np.int64], segment: SegmentHeader, checksums: bytes
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which of many headers Header.decode would take, without decoding them, and which were
    written there in this generation and are damaged. The rest are free places.

    Args:
        raw: the headers, one after the other, `segment.header_bytes` each.
        records: [n], the number of the record that each was read from.
        checksums: 16 bytes a header: what header_checksum() of it is.
    """
    headers = np.frombuffer(raw, np.uint8).reshape(len(records), segment.header_bytes)
    rows = headers[:, : _HEADER.size]
    found = np.ascontiguousarray(rows).view(_FIELDS)[:, 0]

    def same(field: str, value: bytes) -> npt.NDArray[np.bool_]:
        want = np.frombuffer(value, np.uint8)
        got = np.ascontiguousarray(found[field]).view(np.uint8).reshape(len(records), -1)
        equal: npt.NDArray[np.bool_] = (got == want.reshape(-1, got.shape[1])).all(axis=1)
        return equal

    written = (
        same("magic", HEADER_MAGIC)
        & (found["version"] == segment.version)
        & same("generation", segment.generation)
    )
    good = (
        written
        & same("checksum", checksums)
        & (found["record"] == records.astype(np.uint64))
        & same("namespace", segment.namespace)
        & (found["payload_bytes"] == segment.payload_bytes)
        & (found["num_tokens"] > 0)
        & (found["num_tokens"] <= segment.chunk_tokens)
    )
    if segment.encoding is not None:
        names = np.frombuffer(segment.encoding.encode()[:24], np.uint8)
        sizes = encoded_bytes(raw, len(records))
        good &= (headers[:, -_ENCODING.size : -8] == names).all(axis=1)
        good &= (sizes > 0) & (sizes <= segment.encoding.num_bytes)
    return good, written & ~good


def chunk_names(raw: memoryview, header_bytes: int) -> Iterator[ChunkName]:
    """The names in whole headers that were judged, one after the other."""
    for at in range(0, len(raw), header_bytes):
        fields = _HEADER.unpack_from(raw, at)
        num_tokens, key, parent, extra, tenant, position = fields[2], *fields[10:15]
        start = at + _HEADER.size
        tokens = bytes(raw[start : start + num_tokens * TOKEN_BYTES])
        extra = b"" if extra == bytes(KEY_BYTES) else extra
        yield ChunkName(Key(key), Key(parent), extra, tenant, position, num_tokens, tokens)


def encoded_bytes(raw: memoryview, count: int) -> npt.NDArray[np.uint64]:
    """[count], the bytes of the encoded payload that each of so many headers states."""
    rows = np.frombuffer(raw, np.uint8).reshape(count, -1)[:, -8:]
    sizes: npt.NDArray[np.uint64] = np.ascontiguousarray(rows).view("<u8")[:, 0]
    return sizes


class Ages(NamedTuple):
    """When records were used last, as far as they say, and how long they may be unused."""

    written_at: npt.NDArray[np.float64]
    used_at: npt.NDArray[np.float64]
    """[count], Unix time in seconds. Uses since the record was written are not in it."""
    ttl_s: npt.NDArray[np.float64]
    """[count], their own; infinite where they have none."""


def tenants(raw: memoryview, header_bytes: int) -> npt.NDArray[np.bytes_]:
    """[headers] of 32 bytes: the tenants that headers state, whole ones that were judged. Trailing
    zeros are not shown, and change no comparison."""
    rows = np.frombuffer(raw, np.uint8).reshape(-1, header_bytes)
    column = np.ascontiguousarray(rows[:, _TENANT_AT : _TENANT_AT + KEY_BYTES])
    return column.view(f"S{KEY_BYTES}")[:, 0]


def ages(raw: memoryview, header_bytes: int) -> Ages:
    """The ages that headers state, whole ones that were judged, one after the other."""
    rows = np.frombuffer(raw, np.uint8).reshape(-1, header_bytes)

    def field(start: int, size: int) -> npt.NDArray[np.float64]:
        begin = start % header_bytes
        column = np.ascontiguousarray(rows[:, begin : begin + size])
        return column.view(f"<u{size}")[:, 0].astype(np.float64)

    ttl_s = field(_AGE_AT + 4, 4)
    ttl_s[ttl_s == 0] = np.inf
    written_at = field(_WRITTEN_AT, 8)
    return Ages(written_at, written_at - field(_AGE_AT, 4), ttl_s)
