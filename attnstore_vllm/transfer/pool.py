# SPDX-License-Identifier: Apache-2.0
"""The DRAM pool: shared memory that the scheduler side and every rank map.

    0              control page: magic, size, one byte a member that has mapped the region
    64 KiB         one page a rank: what its KV tensors look like (JSON), written before the
                   scheduler side reads it
    1 MiB          slots: of a rank, its own part of each, where parts lie apart

The first to come creates it, under a name derived from the engine's id and the directory of
its store. A large one is several files, and one whose ranks have parts of their own
(transfer/pool_files.py). The first has the name itself: it is made first and removed last. The
names go as soon as all members have mapped them, or with their creator, however that leaves
Python. What a kill leaves behind the next start removes (transfer/region.py).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from blake3 import blake3

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError, MachineError
from attnstore_vllm.own_files import NotOursError
from attnstore_vllm.preflight import SHM_DIR, lacks_memory, shared_memory
from attnstore_vllm.transfer import region
from attnstore_vllm.transfer.pool_files import cut, map_side_by_side, stretches_of
from attnstore_vllm.transfer.pool_memory import allocate

logger = logging.getLogger(__name__)

_MAGIC = b"ATTNPOOL"
_CONTROL = struct.Struct("<8sQQ")
"""Magic, the region's bytes, parts that lie apart."""
_MEMBERS_AT = 64
_RANKS_AT = 64 * 1024
_RANK_BYTES = 4096
_REASON_MAX = 500
"""Characters: at most 6 bytes each."""
REFUSAL = "refusal"
"""The key of a description that says why there is none."""
SLOTS_AT = 1024 * 1024
RANKS_MAX = (SLOTS_AT - _RANKS_AT) // _RANK_BYTES
OPEN_DEADLINE_S = 300.0
"""How long a member waits for the creator to allocate the region, and for each GiB of it:"""
OPEN_DEADLINE_S_A_GIB = 1.0
_ANOTHER_START = (
    "another start has the engine_id and the nvme.path of this one, and has not ended yet; "
    "give each server its own, or start again when it has ended"
)


def pool_name(engine_id: str, store_path: Path) -> str:
    digest = blake3(f"{engine_id}\0{store_path}".encode()).hexdigest()[:24]
    return f"{region.PREFIX}{digest}"


class SharedPool:
    """This process's mapping of the region.

    Args:
        name: of the region, the same in all members.
        num_slots, slot_bytes: its shape, the same in all members.
        num_ranks: members 0..num_ranks-1 are the ranks, member num_ranks the scheduler side.
        member: which of them this is.
        near: the NUMA node of each rank's GPU, if all are known (pool_memory.gpu_numa_node()).
            Who creates the region takes each part's memory there.
        num_parts: of the slots, that lie apart (pool_files.parts_of()), the same in all members.
            A rank maps its own part alone: that is what slots and their bytes mean to it then.

    Lifetime: `buffer` and every view of it are valid until close().
    Raises: ConfigError if the machine has less shared memory than that, or if another start
    or another user uses the name.
    """

    def __init__(
        self,
        name: str,
        num_slots: int,
        slot_bytes: int,
        *,
        num_ranks: int,
        member: int,
        near: Sequence[int] = (),
        num_parts: int = 1,
    ) -> None:
        assert 0 < num_ranks <= RANKS_MAX
        assert 0 <= member <= num_ranks
        assert num_ranks % num_parts == slot_bytes % num_parts == 0
        self.num_slots = num_slots
        self.num_parts = num_parts
        self._size_bytes = SLOTS_AT + num_slots * slot_bytes
        self._path = SHM_DIR / name
        self._files = cut(SLOTS_AT, num_slots, slot_bytes // num_parts, num_parts)
        part = None if num_parts == 1 or member == num_ranks else member * num_parts // num_ranks
        self._part = part
        self.slot_bytes = slot_bytes if part is None else slot_bytes // num_parts
        self._leave: list[Callable[[], Any]] = []
        try:
            fds = self._fds = self._create_or_open(near)
            self.buffer = map_side_by_side(fds, list(stretches_of(self._files, SLOTS_AT, part)))
        except NotOursError as error:
            self._give_up()
            raise MachineError(f"{error}, or start the server with another engine_id") from error
        except OSError as error:
            self._give_up()
            raise MachineError(
                f"the DRAM tier cannot be shared at {self._path}: {error}"
            ) from error
        self._join(num_ranks, member)

    @property
    def address(self) -> int:
        """The address of slot 0 in this process; valid until close()."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer)) + SLOTS_AT

    @property
    def paths(self) -> list[Path]:
        """The files: the first one has the region's name."""
        later = range(1, len(self._files))
        return [self._path, *(self._path.with_name(f"{self._path.name}.{i}") for i in later)]

    def borders(self) -> list[int]:
        """The first slot of each file but the first, of what this member maps."""
        part = self._part or 0
        return [file.first_slot for file in self._files if file.part == part][1:]

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot, or of this rank's part of it, writable."""
        assert 0 <= slot < self.num_slots
        start = SLOTS_AT + slot * self.slot_bytes
        return self.buffer[start : start + self.slot_bytes]

    def read_only_fds(self) -> list[int]:
        """New descriptors of the files, that can be mapped for reading alone; the caller's."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        return [os.open(f"/proc/self/fd/{fd}", flags) for fd in self._fds]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The slots that its files have room for, bytes of a whole slot, parts that lie apart."""
        last = self._files[-1]
        return last.stop_slot, last.part_bytes * self.num_parts, self.num_parts

    def keep(self, num_slots: int) -> None:
        """Use the first slots alone from now on, in this process; the memory of the others stays
        taken."""
        assert 0 < num_slots <= self.num_slots
        self.num_slots = num_slots

    def publish(self, rank: int, description: Mapping[str, Any]) -> None:
        """Leave what `rank`'s KV tensors look like for the scheduler side.

        A description that has no room becomes a refusal: a server that starts is worth more.
        """
        raw = _raw(description)
        if not has_room(description):
            why = f"its description takes {len(raw)} bytes, and there is room for {_RANK_BYTES - 4}"
            raw = _raw({REFUSAL: why})
        at = _RANKS_AT + rank * _RANK_BYTES
        self.buffer[at + 4 : at + 4 + len(raw)] = raw
        self.buffer[at : at + 4] = struct.pack("<I", len(raw))

    def refuse(self, rank: int, reason: str) -> None:
        """Say in place of a description why `rank` cannot work with the store."""
        self.publish(rank, {REFUSAL: reason[:_REASON_MAX]})

    def has_joined(self, member: int) -> bool:
        """Whether it has opened this region, which a process of another machine cannot."""
        return bool(self.buffer[_MEMBERS_AT + member])

    def description(self, rank: int) -> dict[str, Any] | None:
        """The description that publish() left, or None if that rank has not published."""
        at = _RANKS_AT + rank * _RANK_BYTES
        return _published(bytes(self.buffer[at : at + _RANK_BYTES]))

    def close(self) -> None:
        """Give the region up. The memory goes back when the last member has done so, or has ended;
        what is still viewed here stays mapped until then."""
        self.buffer = memoryview(b"")
        self._give_up()

    def _hold(self, fd: int, path: Path, *, is_creator: bool) -> int:
        """`fd`, which is given up by close(), with this object, or when Python ends. What was held
        last is given up first, so the region's own name goes last."""
        held = Finalize(self, region.leave, (fd, path, is_creator), exitpriority=0)
        self._leave.append(held)
        return fd

    def _create_or_open(self, near: Sequence[int]) -> list[int]:
        """The files' descriptors, with shared locks that say that this member lives."""
        first, *later = self.paths
        deadline_s = OPEN_DEADLINE_S + OPEN_DEADLINE_S_A_GIB * self._size_bytes / (1 << 30)
        deadline = time.monotonic() + deadline_s
        while True:
            fd = region.create(first)
            if fd is not None:
                return self._create(self._hold(fd, first, is_creator=True), later, near)
            fd = region.find(first)
            if fd is not None and self._is_ready(fd, deadline, deadline_s):
                self._hold(fd, first, is_creator=False)
                found = [fd, *self._open(later)]
                if len(found) == len(self._files):
                    return found
                self._give_up()  # it goes with its creator
                if time.monotonic() > deadline:
                    raise ConfigError(f"a part of {first} has lost its name; {_ANOTHER_START}")
                time.sleep(0.01)

    def _open(self, paths: Sequence[Path]) -> Iterator[int]:
        """The later files, locked, as far as they still have their names."""
        for path in paths:
            fd = region.find(path)
            if fd is None:
                return
            self._hold(fd, path, is_creator=False)
            if not region.lock(fd):
                return
            yield fd

    def _create(self, first: int, later: Sequence[Path], near: Sequence[int]) -> list[int]:
        fds = [first]
        try:
            region.sweep(SHM_DIR)
            for path in later:
                fds.append(self._hold(region.create_anew(path), path, is_creator=True))
            of_a_part = len(near) // self.num_parts
            allocate(
                [
                    (fd, file.file_bytes, near[file.part * of_a_part :][:of_a_part])
                    for fd, file in zip(fds, self._files, strict=True)
                ]
            )
        except FileExistsError as error:
            self._give_up()
            raise ConfigError(f"{error}; {_ANOTHER_START}") from error
        except NotOursError:
            raise
        except OSError as error:
            self._give_up()
            size = self._size_bytes
            why = lacks_memory(size, shared_memory(SHM_DIR), size) or "ask for less"
            raise ConfigError(
                f"dram asks for {format_size(size)} of shared memory, which the machine does not "
                f"have now ({error}): {why}"
            ) from error
        os.pwrite(first, _CONTROL.pack(_MAGIC, *self._shape()), 0)
        return fds

    def _give_up(self) -> None:
        while self._leave:
            self._leave.pop()()

    def _is_ready(self, fd: int, deadline: float, deadline_s: float) -> bool:
        """Whether it is, with this member's lock; False, and closed, if the region is gone: it was
        one that a killed start had left behind."""
        while time.monotonic() < deadline:
            if region.remove_if_dead(fd, self._path):
                os.close(fd)
                return False
            shape = _shape_if_ready(fd)
            if shape:
                if region.lock(fd) and shape == self._shape():
                    return True
                os.close(fd)
                if shape != self._shape():
                    raise ConfigError(
                        f"{self._path} has {shape[0]} bytes in {shape[1]} parts, and this process "
                        f"expects {self._shape()}: settings, or vm.max_map_count, have changed "
                        "while the server started; start it again"
                    )
                return False
            time.sleep(0.01)
        os.close(fd)
        raise ConfigError(
            f"{self._path} was not made ready within {deadline_s:.0f} s by the process that "
            "created it; its log says why"
        )

    def _shape(self) -> tuple[int, int]:
        return self._size_bytes, self.num_parts

    def _join(self, num_ranks: int, member: int) -> None:
        if self.buffer[_MEMBERS_AT + member]:
            self.close()
            raise ConfigError(f"{self._path} is in use; {_ANOTHER_START}")
        self.buffer[_MEMBERS_AT + member] = 1
        if all(self.buffer[_MEMBERS_AT : _MEMBERS_AT + num_ranks + 1]):
            for path in reversed(self.paths):
                path.unlink(missing_ok=True)


def _shape_if_ready(fd: int) -> tuple[int, int] | None:
    """The region's bytes and parts, or None if its creator has not allocated it yet."""
    raw = os.pread(fd, _CONTROL.size, 0)
    magic, num_bytes, num_parts = _CONTROL.unpack(raw.ljust(_CONTROL.size, b"\0"))
    return (num_bytes, num_parts) if magic == _MAGIC else None


def peek(name: str, rank: int) -> dict[str, Any] | None:
    """The description of `rank` in the region of this name, to a process that is no member yet: the
    shape of the slots may be in it. None if that rank has not published, or there is no region.

    Raises: NotOursError, OSError.
    """
    fd = region.find(SHM_DIR / name)
    if fd is None:
        return None
    try:
        return _published(os.pread(fd, _RANK_BYTES, _RANKS_AT + rank * _RANK_BYTES))
    finally:
        os.close(fd)


def has_room(description: Mapping[str, Any]) -> bool:
    """Whether publish() would leave this description as it is."""
    return len(_raw(description)) + 4 <= _RANK_BYTES


def _raw(description: Mapping[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True).encode()


def _published(page: bytes) -> dict[str, Any] | None:
    """The description that publish() has left on a rank's page; None if none."""
    length = int.from_bytes(page[:4], "little")
    if length == 0:
        return None
    found = json.loads(page[4 : 4 + length])
    assert isinstance(found, dict)
    return found
