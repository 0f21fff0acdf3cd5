# SPDX-License-Identifier: Apache-2.0
"""Files of the pool: shared memory that a process maps side by side in one range of addresses.

Slots hold the ranks' parts one behind the other, and so do records on NVMe. In memory the parts
may lie apart: a rank maps its own part of all slots as one range, and page-locks no more than that,
near its GPU. The scheduler side maps slot for slot what belongs together.

    files of part 0      control | slot 0 | slot 1 | slot 2 | ...
    files of part 1      unused  | slot 0 | slot 1 | slot 2 | ...
    a rank               control | its part of slot 0 | of slot 1 | ...
    the scheduler side   control | slot 0: part 0, part 1 | slot 1: part 0, part 1 | ...

The kernel gives one file its memory on one thread, since it holds the file's lock meanwhile. So a
large part is several files, which several threads fill. A file ends at a slot's border: a part of
a slot is in one file, and a driver that page-locks file by file locks whole ones.

A huge page is mapped only where address and place in the file agree to 2 MiB. So a file's slots
begin as far past such a border as their addresses in a rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from attnstore_vllm.transfer.geometry import Geometry

FILE_MIN_BYTES: Final = 1 << 30
"""A thread that allocates less is not worth its start."""
FILES_MAX: Final = 16
"""More threads get no more of the memory's bandwidth."""
HUGE_BYTES: Final = 2 << 20
MAPPINGS_SPARE: Final = 15_000
"""Mappings that are left to the rest of the scheduler's process."""
MAX_MAP_COUNT: Final = Path("/proc/sys/vm/max_map_count")
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class PoolFile:
    """One part of the slots [first_slot, stop_slot), `part_bytes` of each."""

    part: int
    first_slot: int
    stop_slot: int
    part_bytes: int
    begins_at: int
    """Bytes before it; those of the first file are the control page."""

    @property
    def num_bytes(self) -> int:
        """Size of all that it holds of slots."""
        return (self.stop_slot - self.first_slot) * self.part_bytes

    @property
    def file_bytes(self) -> int:
        return self.begins_at + self.num_bytes


class Stretch(NamedTuple):
    """Bytes of a file that are mapped."""

    file: int
    at: int
    num_bytes: int


def parts_of(geometry: Geometry, num_slots: int) -> tuple[int, str]:
    """How many parts of the slots lie apart, and, if it is one for several ranks, why.

    All members come to the same answer.
    """
    parts = geometry.num_ranks // geometry.replicas
    if parts == 1:
        return 1, ""
    if geometry.rank_bytes % mmap.PAGESIZE:
        return 1, f"a rank's part of a slot, {geometry.rank_bytes} bytes, is not whole pages"
    wanted = parts * num_slots + MAPPINGS_SPARE
    if wanted > int(MAX_MAP_COUNT.read_text()):
        return 1, (
            f"{num_slots} slots of {parts} ranks are more mappings than a process may have; "
            f"sysctl -w vm.max_map_count={wanted} allows them"
        )
    return parts, ""


def cut(
    first_slot_at: int, num_slots: int, part_bytes: int, num_parts: int = 1
) -> tuple[PoolFile, ...]:
    """The files of a pool, part by part. All members come to the same ones.

    Args:
        first_slot_at: bytes before slot 0 in every member; they are in the first file.
    """
    assert first_slot_at < HUGE_BYTES
    wanted = min(FILES_MAX // num_parts, num_slots * part_bytes // FILE_MIN_BYTES, num_slots)
    count = max(1, wanted)
    starts = [num_slots * number // count for number in range(count + 1)]
    return tuple(
        PoolFile(part, first, stop, part_bytes, (first_slot_at + first * part_bytes) % HUGE_BYTES)
        for part in range(num_parts)
        for first, stop in pairwise(starts)
    )


def stretches_of(
    files: Sequence[PoolFile], first_slot_at: int, part: int | None = None
) -> Iterator[Stretch]:
    """Bytes that a member maps, in the order of its addresses.

    Args:
        part: of the slots; None: all parts, slot for slot.
    """
    yield Stretch(0, 0, first_slot_at)
    num_parts = files[-1].part + 1
    of_a_part = len(files) // num_parts
    if num_parts == 1 or part is not None:
        first = of_a_part * (part or 0)
        for number in range(first, first + of_a_part):
            yield Stretch(number, files[number].begins_at, files[number].num_bytes)
        return
    for number, file in enumerate(files[:of_a_part]):
        for at in range(file.begins_at, file.file_bytes, file.part_bytes):
            for same_slot in range(number, len(files), of_a_part):
                yield Stretch(same_slot, at, file.part_bytes)


def map_side_by_side(fds: Sequence[int], stretches: Sequence[Stretch]) -> memoryview:
    """The bytes of all stretches, one behind the other, writable.

    They are unmapped when the last view of them has gone, so that a late copy finds memory.
    Raises: OSError if the process has no such range of addresses, or may not lock so much.
    """
    total = sum(stretch.num_bytes for stretch in stretches)
    reserved_bytes = total + HUGE_BYTES
    reserved = _mmap(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE, -1)
    start = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    array = (ctypes.c_ubyte * total).from_address(start)
    weakref.finalize(array, _munmap, reserved, reserved_bytes).atexit = False
    at = start
    for file, offset, num_bytes in stretches:
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(at, num_bytes, writable, mmap.MAP_SHARED | _MAP_FIXED, fds[file], offset)
        at += num_bytes
    return memoryview(array).cast("B")


def _mmap(
    address: int | None, num_bytes: int, protection: int, flags: int, fd: int, offset: int = 0
) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    given = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), protection, flags, fd)
    found = libc.mmap(*given, ctypes.c_long(offset))
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {num_bytes} bytes of the pool: {os.strerror(code)}")
    return int(found)


def _munmap(address: int, num_bytes: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))
