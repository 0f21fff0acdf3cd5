# SPDX-License-Identifier: Apache-2.0
"""`attnstore gc DIR`: delete by age, namespace, tenant or size. The server must be stopped.

What is deleted is punched out of the file: the bytes are gone, and the file system has the
space back until the next server start reserves it again.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnstore_vllm.cli.slab_file import Record, SlabFile, State, opened, slab_files
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.machine import lock_directory
from attnstore_vllm.store.format import PAGE_BYTES, SegmentHeader
from attnstore_vllm.store.slab import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_age(text: str) -> float:
    """Seconds of "7d", "12h", "30min". Raises: ConfigError."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--older-than is {text!r}; write a number and a unit (s, min, h, d, w), as in 7d"
        )
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What is to go: records for which any rule holds; then segments, down to `to_size`."""

    older_than_s: float | None = None
    namespace: str | None = None
    """A prefix of its hexadecimal name, as `attnstore inspect` shows it."""
    tenant: str | None = None
    """The cache_salt; the store has only a hash of it."""
    to_size: int | None = None


@dataclass(slots=True)
class Freed:
    records: int = 0
    segments: int = 0
    bytes: int = 0


def collect(directory: Path, rules: Rules) -> Freed:
    """Delete. Raises: ConfigError, also where a running server owns the directory; OSError."""
    freed = Freed()
    paths = slab_files(directory)
    for path in paths:
        lock = lock_directory(path.parent)
        try:
            with opened(path, writable=True) as slab:
                before = slab.allocated_bytes
                _collect(slab, rules, freed, None if rules.to_size is None
                         else rules.to_size // len(paths))  # fmt: skip
                os.fsync(slab.fd)
                freed.bytes += max(0, before - slab.allocated_bytes)
        finally:
            os.close(lock)
    return freed


def _collect(slab: SlabFile, rules: Rules, freed: Freed, to_size: int | None) -> None:
    wanted = _wanted(rules)
    ages: list[tuple[int, int, int]] = []
    last_used: dict[bytes, int] = {}
    for number, segment in slab.segments():
        if not isinstance(segment, SegmentHeader):
            _punch(slab, slab.segment_offset(number), slab.segment_bytes)
            continue
        if rules.namespace and segment.namespace.hex().startswith(rules.namespace.lower()):
            _release(slab, number, freed)
            continue
        newest = 0
        for record in slab.records(segment, payloads=False):
            if record.state is State.FREE:
                continue
            if record.state is State.BAD or wanted(record):
                _punch(slab, record.offset, segment.record_bytes)
                freed.records += 1
            elif record.header is not None:
                newest = max(newest, record.header.written_at)
        if newest == 0:
            _release(slab, number, freed)
        else:
            used = max(last_used.get(segment.namespace, 0), segment.last_used)
            last_used[segment.namespace] = used
            ages.append((used, newest, number))
    if to_size is not None:
        for _, _, number in sorted(ages):
            if slab.allocated_bytes <= to_size:
                return
            _release(slab, number, freed)


def _wanted(rules: Rules) -> Callable[[Record], bool]:
    limit = None if rules.older_than_s is None else time.time() - rules.older_than_s
    tenant = None if rules.tenant is None else tenant_hash(rules.tenant)

    def wanted(record: Record) -> bool:
        header = record.header
        assert header is not None
        too_old = limit is not None and header.written_at < limit
        return too_old or (tenant is not None and header.name.tenant == tenant)

    return wanted


def _release(slab: SlabFile, number: int, freed: Freed) -> None:
    """The segment is nobody's any more."""
    offset = slab.segment_offset(number)
    os.pwrite(slab.fd, bytes(PAGE_BYTES), offset)
    _punch(slab, offset, slab.segment_bytes)
    freed.segments += 1


def _punch(slab: SlabFile, offset: int, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    if libc.fallocate(slab.fd, mode, ctypes.c_long(offset), ctypes.c_long(num_bytes)) == 0:
        return
    zeros = bytes(1 << 20)  # a file system without holes: overwrite
    end = min(offset + num_bytes, os.fstat(slab.fd).st_size)
    while offset < end:
        offset += os.pwrite(slab.fd, zeros[: end - offset], offset)
