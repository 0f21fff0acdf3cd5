# SPDX-License-Identifier: Apache-2.0
"""The slab file: made, opened, and where in it things are. Bytes move through a Device.

Invariants:
- the file never grows: superblock + num_records * record_bytes <= capacity, allocated at start;
- records of another namespace, geometry, version or generation are not ours: never read.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from attnstore_vllm.config import format_size
from attnstore_vllm.errors import ConfigError, CorruptRecordError
from attnstore_vllm.store.format import (
    GENERATION_BYTES,
    PAGE_BYTES,
    Superblock,
    header_bytes,
    pages,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slab:
    """An open slab: what its records have in common, and where each one is."""

    path: Path
    superblock: Superblock
    num_records: int
    fresh: bool
    """True if no earlier record can be in it, so that recovery has nothing to look for."""

    @property
    def header_bytes(self) -> int:
        return header_bytes(self.superblock.chunk_tokens)

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + pages(self.superblock.payload_bytes)

    def offset(self, record: int) -> int:
        assert 0 <= record < self.num_records
        return PAGE_BYTES + record * self.record_bytes

    def payload_offset(self, record: int) -> int:
        return self.offset(record) + self.header_bytes

    def where(self, record: int) -> str:
        return f"{self.path}, record {record}"


def open_slab(
    path: Path, capacity_bytes: int, chunk_tokens: int, payload_bytes: int, namespace: bytes
) -> Slab:
    """Make or reuse the slab file for records of this shape. The caller holds the lock.

    Raises: ConfigError if the capacity holds no record, or the disk does not have it.
    """
    assert payload_bytes % PAGE_BYTES == 0
    record_bytes = header_bytes(chunk_tokens) + payload_bytes
    num_records = (capacity_bytes - PAGE_BYTES) // record_bytes
    if num_records < 1:
        raise ConfigError(
            f"nvme.capacity is {format_size(capacity_bytes)}, but one chunk of {chunk_tokens} "
            f"tokens takes {format_size(record_bytes)}; ask for more, or lower chunk_tokens"
        )
    wanted = Superblock(chunk_tokens, payload_bytes, namespace, secrets.token_bytes(16))
    assert len(wanted.generation) == GENERATION_BYTES
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"nvme.path: {path} cannot be opened: {error}") from error
    try:
        found = _read_superblock(fd, path)
        reuse = found is not None and _same_shape(found, wanted)
        superblock = found if reuse and found is not None else wanted
        _allocate(fd, path, PAGE_BYTES + num_records * record_bytes)
        if not reuse:
            os.pwrite(fd, superblock.encode(), 0)
            os.fdatasync(fd)
    except OSError as error:
        raise ConfigError(
            f"nvme.path: {path} cannot be made ready with nvme.capacity "
            f"{format_size(capacity_bytes)}: {error}; check the disk, or ask for less"
        ) from error
    finally:
        os.close(fd)
    return Slab(path, superblock, num_records, fresh=not reuse)


def _same_shape(found: Superblock, wanted: Superblock) -> bool:
    return (found.chunk_tokens, found.payload_bytes, found.namespace) == (
        wanted.chunk_tokens,
        wanted.payload_bytes,
        wanted.namespace,
    )


def _read_superblock(fd: int, path: Path) -> Superblock | None:
    raw = os.pread(fd, PAGE_BYTES, 0)
    if len(raw) < PAGE_BYTES:
        return None
    try:
        return Superblock.decode(raw, f"{path}, superblock")
    except CorruptRecordError as error:
        logger.warning("AttnStore starts with an empty NVMe tier: %s", error)
        return None


def _allocate(fd: int, path: Path, num_bytes: int) -> None:
    """Give the file this size, with its blocks reserved where the file system can do that.

    Raises: OSError; the file has its former size then.
    """
    before = os.fstat(fd).st_size
    os.ftruncate(fd, num_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    # posix_fallocate would write every block where the file system cannot reserve them.
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(num_bytes)) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
        # A reservation that fails has taken all that the disk had left.
        os.ftruncate(fd, min(before, num_bytes))
        raise OSError(code, os.strerror(code))
    logger.warning("%s: this file system cannot reserve space; a full disk will lose chunks", path)
