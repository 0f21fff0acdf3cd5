# SPDX-License-Identifier: Apache-2.0
"""A node's file as the command line sees it: `node.bin` of each node but the first.

It has no index, and its records name nothing (tiers/nvme/node_disk.py): neither model nor tenant,
age or size. So the size of a record is told by the first whole one: its checksum says where it
ends. What a record belongs to, only the first node's slab says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from attnstore_vllm.cli.slab_file import ATTEMPTS, File, RecordState, opened_fd
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.device import CHECKSUM_BYTES
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES
from attnstore_vllm.tiers.nvme.node_disk import CHECKSUM_AT, MAGIC

_TRIED = 64
"""Records that are looked at for one that is whole."""
_RECORD_MAX = 1 << 30
_AT_ONCE = 1 << 20
_END = CHECKSUM_AT + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class NodeRecord:
    offset: int
    state: RecordState
    cause: str = ""
    """The fault of one that is BAD."""


class NodeFile(File):
    """An open node file. It may be anything: no number in it is followed beyond its own bytes."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self.num_bytes = os.fstat(fd).st_size
        self.record_bytes = 0
        """0: it has no whole record that would tell."""
        self._not_whole: list[int] = []
        """Then, where records begin that their checksums do not fit."""
        for offset in islice(self._heads(), _TRIED):
            size = self._size_at(offset)
            if not size:
                self._not_whole.append(offset)
            elif not self._records_bytes % size and not offset % size:  # else of an earlier shape
                self.record_bytes = size
                break

    @property
    def num_places(self) -> int:
        return self._records_bytes // self.record_bytes if self.record_bytes else 0

    @property
    def _records_bytes(self) -> int:
        """Without the page behind all records."""
        return max(0, self.num_bytes - PAGE_BYTES)

    def records(self, *, payloads: bool) -> Iterator[NodeRecord]:
        """All records, in order. Where their size is not told, the first damaged ones.

        Args:
            payloads: read and verify them too; else headers only.
        """
        if not self.record_bytes:
            for offset in self._not_whole:
                yield NodeRecord(offset, RecordState.BAD, "payload checksum")
            return
        number, stamps = 0, set[bytes]()
        while (number := self._next_data(0, self.record_bytes, number)) < self.num_places:
            for _ in range(ATTEMPTS):
                record, stamp = self._read(number * self.record_bytes, payloads)
                if record.state is not RecordState.BAD:
                    break
            if record.state is RecordState.GOOD:
                if stamp in stamps:  # it has the record's place in it
                    record = NodeRecord(record.offset, RecordState.BAD, "another record's stamp")
                stamps.add(stamp)
            yield record
            number += 1

    def _read(self, offset: int, payloads: bool) -> tuple[NodeRecord, bytes]:
        page = self._read_at(PAGE_BYTES, offset)
        stamp = page[len(MAGIC) : CHECKSUM_AT]
        if not page.startswith(MAGIC):
            return NodeRecord(offset, RecordState.FREE), stamp
        if page[_END:].strip(b"\0") or not stamp.strip(b"\0"):
            return NodeRecord(offset, RecordState.BAD, "header"), stamp
        if payloads:
            payload = self._read_at(self.record_bytes - PAGE_BYTES, offset + PAGE_BYTES)
            if checksum(payload) != page[CHECKSUM_AT:_END]:
                if self._size_at(offset):  # whole, and of an earlier shape: a server reads it never
                    return NodeRecord(offset, RecordState.FREE), stamp
                return NodeRecord(offset, RecordState.BAD, "payload checksum"), stamp
        return NodeRecord(offset, RecordState.GOOD), stamp

    def _heads(self) -> Iterator[int]:
        """Where pages begin as a record does, in order."""
        at = 0
        while (at := PAGE_BYTES * self._next_data(0, PAGE_BYTES, at // PAGE_BYTES)) < (
            self.num_bytes
        ):
            found = self._read_at(min(_AT_ONCE, self.num_bytes - at), at)
            yield from (
                at + i for i in range(0, len(found), PAGE_BYTES) if found.startswith(MAGIC, i)
            )
            at += _AT_ONCE

    def _size_at(self, offset: int) -> int:
        """The bytes of the record here, by its checksum; 0 if it is not whole. It ends before the
        next one, and before a hole, so that no byte is read for many records."""
        wanted = self._read_at(PAGE_BYTES, offset)[CHECKSUM_AT:_END]
        so_far, at = xxhash.xxh3_128(), offset + PAGE_BYTES
        end = min(self.num_bytes, offset + _RECORD_MAX)
        while at < end and self._next_data(0, PAGE_BYTES, at // PAGE_BYTES) * PAGE_BYTES == at:
            found = self._read_at(min(_AT_ONCE, end - at), at)
            for i in range(0, len(found), PAGE_BYTES):
                if found.startswith(MAGIC, i):
                    return 0
                so_far.update(memoryview(found)[i : i + PAGE_BYTES])
                if so_far.digest() == wanted:
                    return at + i + PAGE_BYTES - offset
            at += len(found)
        return 0


@contextmanager
def opened_node(path: Path) -> Iterator[NodeFile]:
    """Raises: ConfigError where the file cannot be opened."""
    with opened_fd(path) as fd:
        yield NodeFile(path, fd)
