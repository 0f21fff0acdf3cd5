# SPDX-License-Identifier: Apache-2.0
"""The DRAM pool: one shared-memory region that the scheduler side and every rank map.

    0              control page: magic, size, one byte a member that has mapped the region
    64 KiB         one page a rank: what its KV tensors look like (JSON), written before the
                   scheduler side reads it
    1 MiB          slots

Whoever comes first creates it, under a name derived from the engine's id and the directory of
its store. The name goes as soon as all members have mapped it, so that no exit leaves it
behind; each member holds a lock on it, so that a region of a start that was killed before that
is told from a living one, and is removed by the next start.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from attnstore_vllm.config import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.machine import SHM_DIR, lacks_memory, shared_memory
from attnstore_vllm.transfer.pool_memory import allocate

logger = logging.getLogger(__name__)

_PREFIX = "attnstore-"
_MAGIC = b"ATTNPOOL"
_CONTROL = struct.Struct("<8sQ")
_MEMBERS_AT = 64
_RANKS_AT = 64 * 1024
_RANK_BYTES = 4096
SLOTS_AT = 1024 * 1024
RANKS_MAX = (SLOTS_AT - _RANKS_AT) // _RANK_BYTES
OPEN_DEADLINE_S = 300.0
"""How long a member waits for the creator to allocate the region (zeroing takes its time)."""
_YOUNG_S = 60.0
"""A region younger than this may be one that a creator has not locked yet."""


def pool_name(engine_id: str, store_path: Path) -> str:
    digest = blake3(f"{engine_id}\0{store_path}".encode()).hexdigest()[:24]
    return f"{_PREFIX}{digest}"


class SharedPool:
    """This process's mapping of the region.

    Args:
        name: of the region, the same in all members.
        num_slots, slot_bytes: its shape, the same in all members.
        num_ranks: members 0..num_ranks-1 are the ranks, member num_ranks the scheduler side.
        member: which of them this is.
        near: the NUMA node of each rank's GPU, if all are known (pool_memory.gpu_numa_node()).
            Who creates the region takes its memory there.

    Lifetime: `buffer` and every view of it are valid until close().
    Raises: ConfigError if the machine has less shared memory than that.
    """

    def __init__(
        self, name: str, num_slots: int, slot_bytes: int, *, num_ranks: int, member: int,
        near: Sequence[int] = (),
    ) -> None:  # fmt: skip
        assert 0 < num_ranks <= RANKS_MAX
        assert 0 <= member <= num_ranks
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._size_bytes = SLOTS_AT + num_slots * slot_bytes
        self._path = SHM_DIR / name
        self._fd = self._create_or_open(near)
        self.buffer = mmap.mmap(self._fd, self._size_bytes)
        self._join(num_ranks, member)

    @property
    def address(self) -> int:
        """Of slot 0 in this process; valid until close()."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer)) + SLOTS_AT

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        assert 0 <= slot < self.num_slots
        start = SLOTS_AT + slot * self.slot_bytes
        return memoryview(self.buffer)[start : start + self.slot_bytes]

    def publish(self, rank: int, description: Mapping[str, Any]) -> None:
        """Leave what `rank`'s KV tensors look like for the scheduler side."""
        raw = json.dumps(description, sort_keys=True).encode()
        assert len(raw) + 4 <= _RANK_BYTES
        at = _RANKS_AT + rank * _RANK_BYTES
        self.buffer[at + 4 : at + 4 + len(raw)] = raw
        self.buffer[at : at + 4] = struct.pack("<I", len(raw))

    def description(self, rank: int) -> dict[str, Any] | None:
        """What publish() left, or None if that rank has not published."""
        at = _RANKS_AT + rank * _RANK_BYTES
        (length,) = struct.unpack("<I", self.buffer[at : at + 4])
        if length == 0:
            return None
        found = json.loads(self.buffer[at + 4 : at + 4 + length])
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """Unmap. The memory goes back when the last member has done so, or has ended."""
        if self._fd >= 0:
            try:
                self.buffer.close()
            except BufferError:
                logger.debug("the pool is still viewed; the process's end unmaps it")
            os.close(self._fd)
            self._fd = -1

    def _create_or_open(self, near: Sequence[int]) -> int:
        """The region's descriptor, with a shared lock that says that this member lives."""
        deadline = time.monotonic() + OPEN_DEADLINE_S
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            try:
                fd = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                found = self._open_when_ready(flags, deadline)
                if found is not None:
                    return found
            else:
                return self._create(fd, near)

    def _create(self, fd: int, near: Sequence[int]) -> int:
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            sweep(SHM_DIR)
            allocate(fd, self._size_bytes, near)
        except OSError as error:
            os.unlink(self._path)
            os.close(fd)
            size = self._size_bytes
            why = lacks_memory(size, shared_memory(SHM_DIR), size) or "ask for less"
            raise ConfigError(
                f"dram asks for {format_size(size)} of shared memory, which the machine does not "
                f"have now ({error}): {why}"
            ) from error
        os.pwrite(fd, _CONTROL.pack(_MAGIC, self._size_bytes), 0)
        return fd

    def _open_when_ready(self, flags: int, deadline: float) -> int | None:
        """None if the region is gone: it was one that a killed start had left behind."""
        try:
            fd = os.open(self._path, flags)
        except FileNotFoundError:
            return None
        while time.monotonic() < deadline:
            size = _size_if_ready(fd)
            # A creator locks before it makes ready, so an unlocked region that is ready is dead.
            if (size or _is_old(os.fstat(fd))) and _remove_if_dead(fd, self._path):
                os.close(fd)
                return None
            if size:
                fcntl.flock(fd, fcntl.LOCK_SH)  # waits at most for a member that removes it now
                if os.fstat(fd).st_nlink:
                    assert size == self._size_bytes, "members disagree about the pool's size"
                    return fd
                os.close(fd)
                return None
            time.sleep(0.01)
        os.close(fd)
        raise ConfigError(
            f"{self._path} was not made ready within {OPEN_DEADLINE_S:.0f} s by the process that "
            "created it; its log says why"
        )

    def _join(self, num_ranks: int, member: int) -> None:
        self.buffer[_MEMBERS_AT + member] = 1
        if all(self.buffer[_MEMBERS_AT : _MEMBERS_AT + num_ranks + 1]):
            self._path.unlink(missing_ok=True)


def _size_if_ready(fd: int) -> int:
    """The region's bytes, or 0 if its creator has not allocated it yet."""
    raw = os.pread(fd, _CONTROL.size, 0)
    magic, size = _CONTROL.unpack(raw.ljust(_CONTROL.size, b"\0"))
    return int(size) if magic == _MAGIC else 0


def _is_old(found: os.stat_result) -> bool:
    return time.time() - found.st_mtime >= _YOUNG_S


def _remove_if_dead(fd: int, path: Path) -> bool:
    """Unlink the region `fd` at `path` if no process holds it; False, with no lock, if one does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if os.fstat(fd).st_nlink:  # else the name is gone, and may be another region's already
        path.unlink(missing_ok=True)
        logger.warning("removed %s, which a killed start left behind", path)
    return True


def sweep(directory: Path) -> list[str]:
    """Remove regions that no living process holds; returns their names."""
    removed = []
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            if not _is_old(path.stat()):
                continue
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            if _remove_if_dead(fd, path):
                removed.append(path.name)
        finally:
            os.close(fd)
    return removed
