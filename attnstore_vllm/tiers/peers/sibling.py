# SPDX-License-Identifier: Apache-2.0
"""One sibling, as the asker sees it: its connection, its pool, mapped for reading alone, and how it
is doing."""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from attnstore_vllm.own_files import is_ours, owner_of
from attnstore_vllm.policy.breaker import Breaker
from attnstore_vllm.tiers.peers.wire import Message, MessageKind, Wire, WireError, connect
from attnstore_vllm.transfer.page_tables import Unmapped
from attnstore_vllm.transfer.pool import SLOTS_AT
from attnstore_vllm.transfer.pool_files import PoolFile, cut

logger = logging.getLogger(__name__)

SHAPE = struct.Struct("<QQQ")
"""Slots that the pool's files have room for, bytes of a slot, parts of it that lie apart."""


class PeerPool:
    """A sibling's pool. What was mapped stays readable when the sibling has died."""

    def __init__(self, shape: tuple[int, int, int], fds: Sequence[int]) -> None:
        num_slots, slot_bytes, num_parts = shape
        if not 0 < num_parts <= slot_bytes or slot_bytes % num_parts:
            raise WireError("a pool of no known shape")
        self._files = cut(SLOTS_AT, num_slots, slot_bytes // num_parts, num_parts)
        if len(fds) != len(self._files):
            raise WireError(f"{len(fds)} files of a pool, and not {len(self._files)}")
        self._maps = [
            mmap.mmap(fd, _checked(fd, file), mmap.MAP_SHARED, mmap.PROT_READ)
            for fd, file in zip(fds, self._files, strict=True)
        ]
        self.num_slots = num_slots
        self.unmapped = Unmapped(self._maps, writes=False)

    def parts(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, part by part."""
        found = []
        for file, mapped in zip(self._files, self._maps, strict=True):
            if file.first_slot <= slot < file.stop_slot:
                start = file.begins_at + (slot - file.first_slot) * file.part_bytes
                found.append(memoryview(mapped)[start : start + file.part_bytes])
        return found


def _checked(fd: int, file: PoolFile) -> int:
    """The bytes to map. A shorter file would end this process when it is read, and what is in
    another user's he may change."""
    found = os.fstat(fd)
    if not is_ours(fd, found):
        raise WireError(f"a file of a pool is of {owner_of(found)}")
    if found.st_size < file.file_bytes:
        raise WireError("a file of a pool is too short")
    return file.file_bytes


class Sibling:
    """Used by one thread. Not connected at first, and whenever the sibling has gone."""

    def __init__(self, directory: Path, hello: bytes, slot_bytes: int) -> None:
        self.directory = directory
        self._hello = hello
        self._slot_bytes = slot_bytes
        self.wire: Wire | None = None
        self.pool: PeerPool | None = None
        self.breaker = Breaker()
        self._said = ""

    @property
    def is_ready(self) -> bool:
        return self.pool is not None

    def connect(self) -> bool:
        """Whether it listens; it is ready once it has answered."""
        try:
            self.wire = connect(self.directory)
            if self.wire is not None:
                self.wire.send(MessageKind.HELLO, 0, [self._hello])
        except WireError as error:
            self.close()
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("%s is no sibling: %s", self.directory, error)
        return self.wire is not None

    def welcome(self, message: Message) -> None:
        """It has sent its pool. Raises: WireError, OSError."""
        assert self.wire is not None
        try:
            (raw,) = message.fields
            shape = SHAPE.unpack(raw)
            if shape[1] != self._slot_bytes:
                raise WireError(f"slots of {shape[1]} bytes, and not {self._slot_bytes}")
            self.pool = PeerPool(shape, self.wire.fds)
        except (ValueError, struct.error) as error:
            raise WireError(f"no pool: {error}") from error
        finally:
            for fd in self.wire.fds:
                os.close(fd)
            self.wire.fds.clear()

    def close(self) -> None:
        """Its pool's memory goes back with the last copy that is under way. A probe that it has not
        answered is not answered any more."""
        self.breaker.forget_probe()
        if self.wire is not None:
            self.wire.close()
        self.wire = self.pool = None
