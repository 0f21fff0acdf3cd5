# SPDX-License-Identifier: Apache-2.0
"""Work that all devices do on requests in Python: check them, seal them, take checksums."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

import attnstore_vllm._native as native
from attnstore_vllm.io.device import ALIGNMENT_BYTES, CHECKSUM_BYTES, IoRequest, Op


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of the bytes. The GIL is released for large buffers."""
    return xxhash.xxh3_128_digest(data)


def page_checksums(pages: memoryview, page_bytes: int, zero_at: int) -> bytes:
    """The checksum of each page in the buffer, with the CHECKSUM_BYTES at `zero_at` as zero."""
    if hasattr(native, "page_checksums"):
        return native.page_checksums(pages, page_bytes, zero_at)
    found = []
    for at in range(0, len(pages), page_bytes):
        page = bytearray(pages[at : at + page_bytes])
        page[zero_at : zero_at + CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
        found.append(checksum(page))
    return b"".join(found)


def copy_checksums(
    copies: Sequence[tuple[memoryview, Sequence[memoryview]]],
) -> list[bytes]:
    """Fill each first buffer with what the others have, one behind the other.

    Returns the XXH3-128 of each copy: what was copied may change meanwhile. The GIL is released
    once for all of them: beside a busy engine getting it back takes longer than a copy.
    """
    if hasattr(native, "copy_checksums"):
        sums = native.copy_checksums(copies)
        return [sums[at : at + CHECKSUM_BYTES] for at in range(0, len(sums), CHECKSUM_BYTES)]
    for to, parts in copies:
        at = 0
        for part in parts:
            to[at : at + len(part)] = part
            at += len(part)
        assert at == len(to)
    return [checksum(to) for to, _ in copies]


def seal(request: IoRequest) -> bytes:
    """Carry out the seals of a WRITE; returns what the first put in, empty if there is none."""
    first = b""
    for of, at in request.seals:
        digest = checksum(request.buffers[of])
        request.buffers[0][at : at + CHECKSUM_BYTES] = digest
        first = first or digest
    return first


def check(request: IoRequest, size_bytes: int) -> None:
    """Assert what a request must keep to on a device of this size."""
    num_bytes = sum(map(len, request.buffers))
    assert request.offset % ALIGNMENT_BYTES == 0
    assert all(len(buffer) % ALIGNMENT_BYTES == 0 for buffer in request.buffers)
    if request.stride:
        assert request.op is Op.READ
        assert request.stride % ALIGNMENT_BYTES == 0
        assert len({len(buffer) for buffer in request.buffers}) == 1
        assert request.stride >= len(request.buffers[0])
        num_bytes = (len(request.buffers) - 1) * request.stride + len(request.buffers[-1])
    assert 0 <= request.offset <= size_bytes - num_bytes
    assert not request.seals or request.op is Op.WRITE
    assert all(seal.of < len(request.buffers) for seal in request.seals)
    assert not request.checksum or (request.op is Op.READ and request.buffers)
