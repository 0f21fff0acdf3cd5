# SPDX-License-Identifier: Apache-2.0
"""What an earlier run left in the slab: read every header, many at a time.

A header that is not whole, not ours or not of this generation is a free slot. The payload is
not read here: its checksum is verified when the chunk is first wanted.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.io.device import Device, IoRequest, Op
from attnstore_vllm.store.format import Header, header_bytes
from attnstore_vllm.store.slab import Slab


@dataclass(frozen=True, slots=True)
class Found:
    """Records as (slot, name, payload checksum), oldest first."""

    records: list[tuple[int, ChunkName, bytes]]
    last_sequence: int


def scan(slab: Slab, device: Device, depth: int) -> Found:
    """Read all headers, `depth` in flight. A record that cannot be read is a free slot.

    Cost: one header of `slab.header_bytes` a record. The caller is the only user of `device`.
    """
    buffers = [memoryview(mmap.mmap(-1, slab.header_bytes)) for _ in range(depth)]
    free = list(range(depth))
    in_flight: dict[int, tuple[int, int]] = {}  # tag -> (record, buffer)
    headers: list[tuple[int, Header]] = []
    following = 0
    while following < slab.num_records or in_flight:
        requests = []
        while free and following < slab.num_records:
            buffer = free.pop()
            tag = -2 - following  # distinct from every tag the keeper gives
            in_flight[tag] = (following, buffer)
            requests.append(IoRequest(tag, Op.READ, slab.offset(following), (buffers[buffer],)))
            following += 1
        if requests:
            device.submit(requests)
        for completion in device.poll(1.0):
            record, buffer = in_flight.pop(completion.tag)
            if completion.error is None:
                header = _decode(bytes(buffers[buffer]), record, slab)
                if header is not None:
                    headers.append((record, header))
            free.append(buffer)
    headers.sort(key=lambda item: item[1].sequence)
    # Of two records of a chunk the newer: the older may be the one that was found damaged.
    newest = {header.name.key: record for record, header in headers}
    records = [
        (record, header.name, header.payload_checksum)
        for record, header in headers
        if newest[header.name.key] == record
    ]
    return Found(records, headers[-1][1].sequence if headers else 0)


def _decode(raw: bytes, record: int, slab: Slab) -> Header | None:
    try:
        header = Header.decode(raw, record, slab.superblock, slab.where(record))
    except CorruptRecordError:
        return None  # never written, torn, or of before a reset: all are free slots
    name = header.name
    return header if chunk_key(name.parent, name.extra, name.tokens) == name.key else None


_V2 = struct.Struct("<8sII16s16sQQQ16s32s32s32s32s32sQQ")


def v2_pages(records: list[tuple[int, ChunkName, bytes]], chunk_tokens: int) -> bytes:
    """Header pages of format version 2 for records that were found, numbered from 1."""
    size = header_bytes(chunk_tokens)
    pages = bytearray(size * len(records))
    for number, (slot, name, digest) in enumerate(records):
        at, zero = number * size, bytes(32)
        _V2.pack_into(
            pages, at, b"ATTNKV\r\n", 2, name.num_tokens, b"", b"", slot, number + 1, 0, digest,
            zero, name.key, name.parent, name.extra or zero, name.tenant, name.position, 0,
        )  # fmt: skip
        at += _V2.size
        pages[at : at + len(name.tokens)] = name.tokens
    return bytes(pages)
