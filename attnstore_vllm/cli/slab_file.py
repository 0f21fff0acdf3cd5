# SPDX-License-Identifier: Apache-2.0
"""A slab file as the command line sees it: read only, without an engine.

Nothing here needs the lock: a record that a running server is writing is read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from attnstore_vllm.errors import ConfigError, CorruptRecordError
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.codec import CODECS
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.store.format import PAGE_BYTES, Header, Root, SegmentHeader

ATTEMPTS = 3
"""Reads of a record that looks wrong: a running server may just be writing it."""


class RecordState(Enum):
    """The kinds of record that are found on the disk."""

    FREE = "free"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of one segment."""

    segment: SegmentHeader
    number: int
    offset: int
    state: RecordState
    header: Header | None = None
    cause: str = ""
    """The field that is wrong, of a BAD record."""


def slab_files(directory: Path) -> list[Path]:
    """The slab files of an nvme.path: its own, or those of its data-parallel engines.

    Raises: ConfigError if there is none.
    """
    here = [directory / SLAB_NAME, *sorted(directory.glob(f"dp*/{SLAB_NAME}"))]
    found = [path for path in here if path.is_file() and not path.is_symlink()]
    if not found:
        raise ConfigError(
            f"{directory} has no {SLAB_NAME} file (nor dp*/{SLAB_NAME}); give the directory "
            "that nvme.path of the server's settings names"
        )
    return found


class SlabFile:
    """An open slab file. Raises ConfigError if it is not one of this version."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        try:
            raw = os.pread(fd, PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0")
            self.segment_bytes = Root.decode(raw, f"{path}, root").segment_bytes
        except CorruptRecordError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.field} of its first page is not that of this "
                "version; a server that starts on it begins with an empty tier"
            ) from error
        size = os.fstat(fd).st_size
        self.num_segments = -(-max(0, size - PAGE_BYTES) // self.segment_bytes)

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def segment_offset(self, number: int) -> int:
        return PAGE_BYTES + number * self.segment_bytes

    def segments(self) -> Iterator[tuple[int, SegmentHeader | str | None]]:
        """(number, header); in its place None for a free segment, words for a damaged one."""
        for number in range(self.num_segments):
            raw = os.pread(self.fd, PAGE_BYTES, self.segment_offset(number))
            if not raw.strip(b"\0"):
                yield number, None
                continue
            try:
                raw = raw.ljust(PAGE_BYTES, b"\0")
                header = SegmentHeader.decode(raw, number, f"{self.path}, segment {number}")
            except CorruptRecordError as error:
                yield number, error.field
            else:
                yield number, header

    def num_records(self, segment: SegmentHeader) -> int:
        return (self.segment_bytes - PAGE_BYTES) // segment.record_bytes

    def records(self, segment: SegmentHeader, *, payloads: bool) -> Iterator[Record]:
        """Every record slot of a segment, in order.

        Args:
            payloads: read and verify them too; else headers only.
        """
        count = self.num_records(segment)
        for i in range(count):
            number = segment.number * count + i
            offset = self.segment_offset(segment.number) + PAGE_BYTES + i * segment.record_bytes
            for _ in range(ATTEMPTS):
                record = self._read(segment, number, offset, payloads)
                if record.state is not RecordState.BAD:
                    break
            yield record

    def _read(self, segment: SegmentHeader, number: int, offset: int, payloads: bool) -> Record:
        size = segment.header_bytes
        raw = os.pread(self.fd, size, offset).ljust(size, b"\0")
        try:
            header = Header.decode(raw, number, segment, f"{self.path}, record {number}")
        except CorruptRecordError as error:
            # No header of this segment's generation was ever written here, or it was deleted.
            never = error.field in ("magic", "version", "generation")
            state = RecordState.FREE if never else RecordState.BAD
            return Record(segment, number, offset, state, cause="" if never else error.field)
        name = header.name
        if chunk_key(name.parent, name.extra, name.tokens) != name.key:
            return Record(segment, number, offset, RecordState.BAD, header, "key")
        if payloads:
            payload = os.pread(self.fd, header.stored_bytes, offset + size)
            if checksum(payload) != header.payload_checksum:
                return Record(segment, number, offset, RecordState.BAD, header, "payload checksum")
            if not _is_decoded(header, payload):
                return Record(segment, number, offset, RecordState.BAD, header, "encoding")
        return Record(segment, number, offset, RecordState.GOOD, header)


def _is_decoded(header: Header, payload: bytes) -> bool:
    """Whether its codec takes the payload. That of a codec which is not here is not tried."""
    encoding = header.encoding
    codec = None if encoding is None else CODECS.get(encoding.codec)
    if encoding is None or codec is None or codec.version != encoding.version:
        return True
    out = memoryview(bytearray(header.payload_bytes))
    return codec.decode(memoryview(payload)[: encoding.num_bytes], out)


@contextmanager
def opened(path: Path, *, writable: bool = False) -> Iterator[SlabFile]:
    """Raises: ConfigError, also where the file cannot be opened."""
    flags = os.O_RDWR if writable else os.O_RDONLY
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error}") from error
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NOREUSE)
        yield SlabFile(path, fd)
    finally:
        os.close(fd)
