# SPDX-License-Identifier: Apache-2.0
"""Files of the pool: shared memory that lies side by side in one range of addresses.

The kernel gives one file its memory on one thread, since it holds the file's lock meanwhile. So a
large pool is several files, which several threads fill. A file ends at a slot's border: a slot
is in one file, and a driver that page-locks file by file locks whole slots.

    addresses   |  control, slots 0..9  | slots 10..19 | slots 20..29 |
    files        name                    name.1         name.2

A huge page is mapped only where address and place in the file agree to 2 MiB. So a file begins with
as many unused bytes as its address is past such a border.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FILE_MIN_BYTES: Final = 1 << 30
"""A thread that allocates less is not worth its start."""
FILES_MAX: Final = 16
"""More threads get no more of the memory's bandwidth."""
HUGE_BYTES: Final = 2 << 20
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class PoolFile:
    """One file: `num_bytes` of it are mapped, from `skipped_bytes` on."""

    num_bytes: int
    skipped_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        return self.skipped_bytes + self.num_bytes


def cut(first_slot_at: int, num_slots: int, slot_bytes: int) -> tuple[PoolFile, ...]:
    """The files of a pool. All members come to the same ones.

    Args:
        first_slot_at: bytes before slot 0; they are in the first file.
    """
    count = max(1, min(FILES_MAX, num_slots * slot_bytes // FILE_MIN_BYTES, num_slots))
    files: list[PoolFile] = []
    at = 0
    for number in range(count):
        end = first_slot_at + num_slots * (number + 1) // count * slot_bytes
        files.append(PoolFile(end - at, at % HUGE_BYTES))
        at = end
    return tuple(files)


def map_side_by_side(fds: Sequence[int], files: Sequence[PoolFile]) -> memoryview:
    """The bytes of all files, one behind the other, writable.

    They are unmapped when the last view of them has gone, so that a late copy finds memory.
    Raises: OSError if the process has no such range of addresses, or may not lock so much.
    """
    total = sum(file.num_bytes for file in files)
    reserved_bytes = total + HUGE_BYTES
    reserved = _mmap(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE, -1)
    start = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    array = (ctypes.c_ubyte * total).from_address(start)
    weakref.finalize(array, _munmap, reserved, reserved_bytes).atexit = False
    at = start
    for fd, file in zip(fds, files, strict=True):
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _mmap(at, file.num_bytes, writable, flags, fd, file.skipped_bytes)
        at += file.num_bytes
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
