# SPDX-License-Identifier: Apache-2.0
"""A slab file as the command line sees it: read only, without an engine.

Nothing here needs the lock: a record that a running server is writing is read again.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from attnstore_vllm.errors import ConfigError, CorruptRecordError
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.codec import CODECS
from attnstore_vllm.own_files import open_own, open_regular
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.format import (
    EXPANSION_MAX,
    PAGE_BYTES,
    Header,
    Root,
    SegmentHeader,
)
from attnstore_vllm.tiers.nvme.node_disk import FILE_NAME

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


def stored_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """The slab files of an nvme.path, its own and those of its data-parallel engines; and the files
    of a node that is not the first (node_file.py).

    Raises: ConfigError if there is none.
    """
    slabs, nodes = (_files(directory, name) for name in (SLAB_NAME, FILE_NAME))
    if not slabs and not nodes:
        raise ConfigError(
            f"{directory} has no {SLAB_NAME} file (nor dp*/{SLAB_NAME}); give the directory "
            "that nvme.path of the server's settings names"
        )
    return slabs, nodes


def _files(directory: Path, name: str) -> list[Path]:
    engines = [path for path in directory.glob(f"dp*/{name}") if _is_engine(path.parent.name)]
    here = [directory / name, *sorted(engines)]
    return [path for path in here if path.is_file() and not path.is_symlink()]


def _is_engine(name: str) -> bool:
    return re.fullmatch(r"dp[0-9]{1,6}", name) is not None


class File:
    """An open file that may have holes, where nothing was ever written. They are not read."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def _next_data(self, first: int, step: int, number: int) -> int:
        """The number, from this one on, of the first of many equal places which has bytes on the
        disk; beyond all places if there is none."""
        at = first + number * step
        try:
            found = os.lseek(self.fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind this
                return 1 << 63
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return max(number, (found - first) // step)

    def _read_at(self, num_bytes: int, offset: int) -> bytes:
        """Zeros in place of what is behind the file's end. Raises: OSError, with the path."""
        data = b""
        try:
            while len(data) < num_bytes:  # the kernel gives 2 GiB at a time
                more = os.pread(self.fd, num_bytes - len(data), offset + len(data))
                if not more:
                    return data.ljust(num_bytes, b"\0")
                data = data + more if data else more
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return data


class SlabFile(File):
    """An open slab file. Raises ConfigError if it is not one of this version.

    It may be anything: no number in it is followed beyond the file's own bytes.
    """

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        try:
            raw = self._read_at(PAGE_BYTES, 0)
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

    def segments(self) -> Iterator[tuple[int, SegmentHeader | str]]:
        """(number, header) of each segment that is not free; words in place of a damaged header."""
        number = 0
        while (number := self._next_data(PAGE_BYTES, self.segment_bytes, number)) < (
            self.num_segments
        ):
            raw = self._read_at(PAGE_BYTES, self.segment_offset(number))
            if raw.strip(b"\0"):
                yield number, self._header(raw, number)
            number += 1

    def _header(self, raw: bytes, number: int) -> SegmentHeader | str:
        try:
            header = SegmentHeader.decode(raw, number, f"{self.path}, segment {number}")
        except CorruptRecordError as error:
            return error.field
        return header if self.num_records(header) else "record larger than it"

    def num_records(self, segment: SegmentHeader) -> int:
        return (self.segment_bytes - PAGE_BYTES) // segment.record_bytes

    def records(self, segment: SegmentHeader, *, payloads: bool) -> Iterator[Record]:
        """The records of a segment, in order. Places without a byte on the disk, which are free,
        are left out.

        Args:
            payloads: read and verify them too; else headers only.
        """
        count, i = self.num_records(segment), 0
        first = self.segment_offset(segment.number) + PAGE_BYTES
        while (i := self._next_data(first, segment.record_bytes, i)) < count:
            offset = first + i * segment.record_bytes
            for _ in range(ATTEMPTS):
                record = self._read(segment, segment.number * count + i, offset, payloads)
                if record.state is not RecordState.BAD:
                    break
            yield record
            i += 1

    def _read(self, segment: SegmentHeader, number: int, offset: int, payloads: bool) -> Record:
        size = segment.header_bytes
        raw = self._read_at(size, offset)
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
            if not self._has(header, offset + size):
                return Record(segment, number, offset, RecordState.BAD, header, "size of the file")
            payload = self._read_at(header.stored_bytes, offset + size)
            if checksum(payload) != header.payload_checksum:
                return Record(segment, number, offset, RecordState.BAD, header, "payload checksum")
            if not _is_decoded(header, payload):
                return Record(segment, number, offset, RecordState.BAD, header, "encoding")
        return Record(segment, number, offset, RecordState.GOOD, header)

    def _has(self, header: Header, offset: int) -> bool:
        """Whether the file can have the payload. Checked before there is memory for it."""
        most = EXPANSION_MAX**2 * self.allocated_bytes
        end = offset + header.stored_bytes
        return end <= os.fstat(self.fd).st_size and header.payload_bytes <= most


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
    with opened_fd(path, writable=writable) as fd:
        yield SlabFile(path, fd)


@contextmanager
def opened_fd(path: Path, *, writable: bool = False) -> Iterator[int]:
    """Raises: ConfigError where the file cannot be opened."""
    try:
        fd = open_own(path, os.O_RDWR) if writable else open_regular(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error}") from error
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NOREUSE)
        yield fd
    finally:
        os.close(fd)
