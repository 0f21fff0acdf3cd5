# SPDX-License-Identifier: Apache-2.0
"""The slab file: made, opened, and whose its segments are. Bytes move through a Device.

The file is a root page and segments of one size. A segment belongs to one namespace, or to
none; several namespaces (other models, other shapes) live side by side under one capacity.

Invariants:
- what is allocated never exceeds the capacity: every segment that may be used is allocated at
  start, the others are given back to the file system there;
- a record is ours if its segment is ours and its header carries the segment's generation.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError, CorruptRecordError, MachineError
from attnstore_vllm.own_files import NotOursError, open_own
from attnstore_vllm.tiers.nvme.format import (
    GENERATION_BYTES,
    PAGE_BYTES,
    Root,
    SegmentHeader,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

SEGMENTS = 64
"""A new file has about so many: the granularity in which namespaces share the capacity."""


def overhead_bytes(capacity_bytes: int) -> int:
    """Bytes that the file system may add for directory, lock and extents; kept free of records."""
    return 16 * 1024 + capacity_bytes // 2048


@dataclass(slots=True)
class Slab:
    """An open slab file, as one namespace sees it. The store's lock guards it."""

    path: Path
    segment_bytes: int
    shape: SegmentHeader
    """The header that our segments share; number and generation are those of no segment."""
    own: dict[int, SegmentHeader] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    """Those of our segments that can hold no record yet, so that recovery leaves them out."""
    free: list[int] = field(default_factory=list)
    """Segments of no namespace; the first is claimed first."""
    foreign: list[SegmentHeader] = field(default_factory=list)
    """Segments of other namespaces; the first gives way first."""
    _reset: bool = False

    @property
    def num_segments(self) -> int:
        """Segments that may be used: together, and with the root, within the capacity."""
        return len(self.own) + len(self.free) + len(self.foreign)

    @property
    def records_max(self) -> int:
        """Record numbers are below this."""
        numbers = [*self.own, *self.free, *(header.number for header in self.foreign)]
        return (max(numbers) + 1) * self.records_per_segment if numbers else 0

    @property
    def header_bytes(self) -> int:
        return self.shape.header_bytes

    @property
    def record_bytes(self) -> int:
        return self.shape.record_bytes

    @property
    def records_per_segment(self) -> int:
        return (self.segment_bytes - PAGE_BYTES) // self.record_bytes

    def records_of(self, segment: int) -> range:
        first = segment * self.records_per_segment
        return range(first, first + self.records_per_segment)

    def segment_offset(self, segment: int) -> int:
        return PAGE_BYTES + segment * self.segment_bytes

    def offset(self, record: int) -> int:
        segment, number = divmod(record, self.records_per_segment)
        return self.segment_offset(segment) + PAGE_BYTES + number * self.record_bytes

    def segment(self, record: int) -> SegmentHeader:
        """The header of the record's segment. The segment is ours."""
        return self.own[record // self.records_per_segment]

    def where(self, record: int) -> str:
        return f"{self.path}, record {record} at byte {self.offset(record)}"

    def claim(self) -> SegmentHeader | None:
        """Make one more segment ours: a free one, or that of the namespace unused for longest.

        Nothing is written: the caller writes the returned header before it uses the records.
        Returns None if every segment is ours.
        """
        if self.free:
            number = self.free.pop(0)
        elif self.foreign:
            victim = self.foreign.pop(0)
            number = victim.number
            logger.info(
                "AttnStore takes %s of %s from %s, last used %s",
                format_size(self.segment_bytes),
                self.path,
                victim.label or "another namespace",
                time.strftime("%Y-%m-%d %H:%M", time.localtime(victim.last_used)),
            )
        else:
            return None
        header = replace(self.shape, number=number, generation=new_generation())
        self.own[number] = replace(header, generation=new_generation()) if self._reset else header
        return header

    def give_back(self, segment: int) -> None:
        """A claimed segment whose header could not be written is free again."""
        del self.own[segment]
        self.free.append(segment)

    def renew(self) -> list[SegmentHeader]:
        """Make all our records invalid (a reset); returns the headers to write.

        What this process writes from now on may belong to weights that no file has, so it
        carries generations that no later start will look for.
        """
        self._reset = True
        headers = [replace(header, generation=new_generation()) for header in self.own.values()]
        for header in headers:
            self.own[header.number] = replace(header, generation=new_generation())
        return headers


def new_generation() -> bytes:
    return secrets.token_bytes(GENERATION_BYTES)


def segment_bytes_for(capacity_bytes: int, record_bytes: int) -> int:
    """The segment size of a new file: whole records, about SEGMENTS segments."""
    room = capacity_bytes - overhead_bytes(capacity_bytes) - PAGE_BYTES
    records = max(1, (room // SEGMENTS - PAGE_BYTES) // record_bytes)
    return PAGE_BYTES + records * record_bytes


def num_segments_for(capacity_bytes: int, segment_bytes: int) -> int:
    room = capacity_bytes - overhead_bytes(capacity_bytes) - PAGE_BYTES
    return max(0, room // segment_bytes)


def open_slab(path: Path, capacity_bytes: int, shape: SegmentHeader) -> Slab:
    """Make or reuse the slab file for records of this shape. The caller holds the lock.

    Raises: ConfigError if the capacity holds no record; MachineError if the disk does not have
    it, refuses the file, or the file is not this user's.
    """
    assert shape.payload_bytes % PAGE_BYTES == 0
    fresh = segment_bytes_for(capacity_bytes, shape.record_bytes)
    if num_segments_for(capacity_bytes, fresh) < 1:
        raise ConfigError(
            f"nvme.capacity is {format_size(capacity_bytes)}, but one chunk of "
            f"{shape.chunk_tokens} tokens takes {format_size(shape.record_bytes)} and a little "
            "for the file system; ask for more, or lower chunk_tokens"
        )
    try:
        with _opened(path) as fd:
            segment_bytes = _segment_bytes(fd, path, capacity_bytes, shape, fresh)
            found = list(_read_segments(fd, path, segment_bytes))
            slab = _share_out(path, segment_bytes, capacity_bytes, shape, found)
            _allocate(fd, slab)
            if not slab.own and (claimed := slab.claim()) is not None:
                slab.fresh.append(claimed.number)
            for header in slab.own.values():
                os.pwrite(fd, header.encode(), slab.segment_offset(header.number))
            os.fdatasync(fd)
    except NotOursError as error:
        raise MachineError(f"nvme.path: {error}") from error
    except OSError as error:
        raise MachineError(
            f"nvme.path: {path} cannot be made ready with nvme.capacity "
            f"{format_size(capacity_bytes)}: {error}; check the disk, or ask for less"
        ) from error
    return slab


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


def _segment_bytes(
    fd: int, path: Path, capacity_bytes: int, shape: SegmentHeader, fresh: int
) -> int:
    """The file's segment size; the file is started anew where it has none that would do."""
    found = _read_root(fd, path)
    if found is not None:
        size = found.segment_bytes
        usable = size % PAGE_BYTES == 0 and size >= PAGE_BYTES + shape.record_bytes
        if usable and num_segments_for(capacity_bytes, size):
            return size
        logger.warning(
            "AttnStore starts with an empty NVMe tier: the segments of %s have %s, which does "
            "not go with records of %s in %s",
            path,
            format_size(size),
            format_size(shape.record_bytes),
            format_size(capacity_bytes),
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, Root(fresh).encode(), 0)
    return fresh


def _read_root(fd: int, path: Path) -> Root | None:
    raw = os.pread(fd, PAGE_BYTES, 0)
    if not raw:
        return None
    try:
        return Root.decode(raw.ljust(PAGE_BYTES, b"\0"), f"{path}, root")
    except CorruptRecordError as error:
        logger.warning("AttnStore starts with an empty NVMe tier: %s", error)
        return None


def _read_segments(fd: int, path: Path, segment_bytes: int) -> Iterable[SegmentHeader]:
    """The headers of all segments that some namespace owns."""
    size = os.fstat(fd).st_size
    for number in range(-(-max(0, size - PAGE_BYTES) // segment_bytes)):
        raw = os.pread(fd, PAGE_BYTES, PAGE_BYTES + number * segment_bytes)
        if not raw.strip(b"\0"):
            continue  # never claimed
        try:
            yield SegmentHeader.decode(
                raw.ljust(PAGE_BYTES, b"\0"), number, f"{path}, segment {number}"
            )
        except CorruptRecordError as error:
            logger.warning("AttnStore takes a segment for free: %s", error)


def _share_out(
    path: Path,
    segment_bytes: int,
    capacity_bytes: int,
    shape: SegmentHeader,
    found: list[SegmentHeader],
) -> Slab:
    """Which segments stay: ours, then those of the namespaces used last, then free ones."""
    slab = Slab(path, segment_bytes, shape)
    room = num_segments_for(capacity_bytes, segment_bytes)
    ours = [h for h in found if _same_shape(h, shape)]
    others = [h for h in found if h.namespace != shape.namespace]
    last_used: dict[bytes, int] = {}
    for header in others:
        known = last_used.get(header.namespace, 0)
        last_used[header.namespace] = max(known, header.last_used)
    others.sort(key=lambda h: (last_used[h.namespace], h.namespace, h.number), reverse=True)
    for header in ours[:room]:
        slab.own[header.number] = replace(header, last_used=shape.last_used, label=shape.label)
    kept = others[: room - len(slab.own)]
    slab.foreign = kept[::-1]
    taken = {*slab.own, *(header.number for header in kept)}
    number = 0
    while len(taken) + len(slab.free) < room:
        if number not in taken:
            slab.free.append(number)
        number += 1
    return slab


def _same_shape(found: SegmentHeader, shape: SegmentHeader) -> bool:
    return (found.namespace, found.chunk_tokens, found.payload_bytes, found.encoding) == (
        shape.namespace,
        shape.chunk_tokens,
        shape.payload_bytes,
        shape.encoding,
    )


FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
NO_RESERVE = "this file system cannot reserve space; a full disk will lose chunks"
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)


def _allocate(fd: int, slab: Slab) -> None:
    """Give the file exactly its usable segments: punch out the others, reserve these.

    Raises: OSError; what the file already had stays allocated then.
    """
    used = {*slab.own, *slab.free, *(header.number for header in slab.foreign)}
    end = slab.segment_offset(max(used)) + slab.segment_bytes
    before = os.fstat(fd).st_size
    if before > end:
        os.ftruncate(fd, end)
    for number in range(max(used)):
        if number not in used:
            _fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, slab, number)
    for number in slab.free:  # what it held has no owner
        os.pwrite(fd, bytes(PAGE_BYTES), slab.segment_offset(number))
    os.ftruncate(fd, end)
    reserved = True
    try:
        for number in sorted(used):
            reserved &= _fallocate(fd, 0, slab, number)
    except OSError:
        os.ftruncate(fd, min(before, end))  # a reservation that fails took all that was left
        raise
    if not reserved:
        logger.warning("%s: %s", slab.path, NO_RESERVE)


def _fallocate(fd: int, mode: int, slab: Slab, segment: int) -> bool:
    return fallocate(fd, mode, slab.segment_offset(segment), slab.segment_bytes)


def fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> bool:
    """False if the file system cannot. posix_fallocate would write every block there. Raises
    OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(num_bytes)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))
