# SPDX-License-Identifier: Apache-2.0
"""Byte layout of the slab file. The prose version is docs/format.md; keep both in step.

    0                  superblock, one page
    4096 + i * record  record i = header (whole pages), then payload

  superblock                                 record header
  offset bytes field                         offset bytes field
       0     8 magic  b"ATTNSLAB"                 0     8 magic  b"ATTNKV\\r\\n"
       8     4 format version                     8     4 format version
      12     4 chunk tokens                      12     4 number of tokens
      16    16 checksum of this page             16    16 checksum of this header
      32    16 generation                        32    16 generation
      48     8 payload bytes of a record         48     8 record number i
      56    32 namespace                         56     8 sequence, grows by one a write
                                                 64     8 payload bytes
                                                 72    16 checksum of the payload
                                                 88    32 key
                                                120    32 parent key
                                                152    32 extra: multimodal inputs, or zero
                                                184    32 tenant: hash of the salt, or zero
                                                216     8 position of the first token
                                                224   4*n token ids, big-endian
                                                          then zero to the end of the page

A checksum is XXH3-128 with its own field zero. The record number stands inside the checksummed
header, so a misplaced record is caught; the generation is that of the superblock, so that one
page write makes all records of a directory invalid at once. Other integers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.types import KEY_BYTES, TOKEN_BYTES, Key

VERSION = 1
PAGE_BYTES = 4096
CHECKSUM_BYTES = 16
GENERATION_BYTES = 16
_SUPERBLOCK = struct.Struct("<8sII16s16sQ32s")
_HEADER = struct.Struct("<8sII16s16sQQQ16s32s32s32s32sQ")
_CHECKSUM_AT = slice(16, 32)
SUPERBLOCK_MAGIC = b"ATTNSLAB"
HEADER_MAGIC = b"ATTNKV\r\n"
assert _SUPERBLOCK.size == 88
assert _HEADER.size == 224


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of the bytes. Cost: about 10 GB/s; the GIL is released for large buffers."""
    return xxhash.xxh3_128_digest(data)


def pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def header_bytes(chunk_tokens: int) -> int:
    return pages(_HEADER.size + chunk_tokens * TOKEN_BYTES)


def _seal(raw: bytearray) -> bytes:
    assert raw[_CHECKSUM_AT] == bytes(CHECKSUM_BYTES)
    raw[_CHECKSUM_AT] = checksum(raw)
    return bytes(raw)


def _check(where: str, fields: tuple[tuple[str, object, object], ...]) -> None:
    for field, want, got in fields:
        if want != got:
            raise CorruptRecordError(where, field, want, got)


def _own_checksum(raw: bytes) -> bytes:
    blank = bytearray(raw)
    blank[_CHECKSUM_AT] = bytes(CHECKSUM_BYTES)
    return checksum(blank)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What all records of a slab have in common."""

    chunk_tokens: int
    payload_bytes: int
    namespace: bytes
    generation: bytes

    def encode(self) -> bytes:
        assert len(self.namespace) == KEY_BYTES
        assert len(self.generation) == GENERATION_BYTES
        raw = bytearray(PAGE_BYTES)
        _SUPERBLOCK.pack_into(
            raw, 0, SUPERBLOCK_MAGIC, VERSION, self.chunk_tokens, bytes(CHECKSUM_BYTES),
            self.generation, self.payload_bytes, self.namespace,
        )  # fmt: skip
        return _seal(raw)

    @classmethod
    def decode(cls, raw: bytes, where: str) -> Superblock:
        """Raises CorruptRecordError on the first field that is not ours."""
        magic, version, tokens, crc, generation, size, namespace = _SUPERBLOCK.unpack_from(raw)
        _check(
            where,
            (
                ("magic", SUPERBLOCK_MAGIC, magic),
                ("version", VERSION, version),
                ("checksum", _own_checksum(raw), crc),
            ),
        )
        return cls(tokens, size, namespace, generation)


@dataclass(frozen=True, slots=True)
class Header:
    """What one record says of itself."""

    name: ChunkName
    sequence: int
    payload_bytes: int
    payload_checksum: bytes

    def encode(self, record: int, generation: bytes, chunk_tokens: int) -> bytes:
        name = self.name
        assert len(self.payload_checksum) == CHECKSUM_BYTES
        assert name.num_tokens <= chunk_tokens
        assert len(name.extra) in (0, KEY_BYTES)
        raw = bytearray(header_bytes(chunk_tokens))
        _HEADER.pack_into(
            raw, 0, HEADER_MAGIC, VERSION, name.num_tokens, bytes(CHECKSUM_BYTES), generation,
            record, self.sequence, self.payload_bytes, self.payload_checksum, name.key,
            name.parent, name.extra.ljust(KEY_BYTES, b"\0"), name.tenant, name.position,
        )  # fmt: skip
        raw[_HEADER.size : _HEADER.size + len(name.tokens)] = name.tokens
        return _seal(raw)

    @classmethod
    def decode(cls, raw: bytes, record: int, superblock: Superblock, where: str) -> Header:
        """Raises CorruptRecordError on the first field that is not what the slab expects."""
        (
            magic, version, num_tokens, crc, generation, number, sequence, size, payload_crc,
            key, parent, extra, tenant, position,
        ) = _HEADER.unpack_from(raw)  # fmt: skip
        _check(
            where,
            (
                ("magic", HEADER_MAGIC, magic),
                ("version", VERSION, version),
                ("generation", superblock.generation, generation),
                ("header checksum", _own_checksum(raw), crc),
                ("record number", record, number),
                ("payload bytes", superblock.payload_bytes, size),
                (
                    "number of tokens within a chunk",
                    True,
                    0 < num_tokens <= superblock.chunk_tokens,
                ),
            ),
        )
        tokens = raw[_HEADER.size : _HEADER.size + num_tokens * TOKEN_BYTES]
        extra = b"" if extra == bytes(KEY_BYTES) else extra
        name = ChunkName(Key(key), Key(parent), extra, tenant, position, num_tokens, tokens)
        return cls(name, sequence, size, payload_crc)
