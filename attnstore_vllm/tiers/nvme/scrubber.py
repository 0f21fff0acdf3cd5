# SPDX-License-Identifier: Apache-2.0
"""Cold records are read again now and then, so that rot is found before a request needs them.

One record at a time, in the order of the file, within a bandwidth budget, and only while
is not read. A record that is not right is dropped and counted, as if it had been asked for.
"""

from __future__ import annotations

import mmap
from functools import partial

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.io.device import Completion, Op
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.tiers.nvme.disk_requests import DiskRequest
from attnstore_vllm.tiers.nvme.format import Header, SegmentHeader
from attnstore_vllm.tiers.nvme.nvme_parts import Disk
from attnstore_vllm.types import NVME, Event

LOOK_MAX = 256
"""Slots that one call looks at for a record to read."""


def check_record(
    page: memoryview, checksum: bytes, chunk: Chunk, segment: SegmentHeader, where: str
) -> Header:
    """The header of a record that was read, if it is the chunk's.

    Args:
        checksum: of the payload that came with it.
    Raises: CorruptRecordError.
    """
    copy = chunk.at(NVME)
    header = Header.decode(bytes(page), copy.slot, segment, where)
    for field, want, got in (
        ("key", chunk.name.key, header.name.key),
        ("payload checksum in the header", copy.checksum, header.payload_checksum),
        ("payload checksum", copy.checksum, checksum),
    ):
        if want != got:
            raise CorruptRecordError(where, field, want.hex(), got.hex())
    return header


class Scrubber:
    """Runs on the store's thread."""

    def __init__(self, disk: Disk, budget: Budget) -> None:
        self._disk = disk
        self._context = context = disk.context
        self._budget = budget
        self._slot = 0
        self._page = memoryview(mmap.mmap(-1, disk.slab.header_bytes))
        self._payload = memoryview(mmap.mmap(-1, context.pool.slot_bytes))
        self._is_reading = False

    def start(self) -> None:
        """Read the next cold record, if the budget has room for it."""
        disk, context = self._disk, self._context
        if self._is_reading or not disk.health.reads.in_use:
            return
        with context.progress:
            chunk = self._next()
            if chunk is None:
                return
            if not self._budget.take(context.clock(), disk.slab.record_bytes):
                return
            context.residency.begin_scrub(disk.tier, chunk)
            segment = disk.slab.segment(chunk.at(NVME).slot)
            stored = self._payload[: disk.stored_bytes(chunk.at(NVME).slot)]
        self._slot = chunk.at(NVME).slot + 1
        self._is_reading = True
        disk.requests.submit(
            [
                DiskRequest(
                    Op.READ,
                    partial(self._finish, chunk, segment),
                    disk.late(Op.READ),
                    offset=disk.slab.offset(chunk.at(NVME).slot),
                    buffers=(self._page, stored),
                    checksum=True,
                )
            ]
        )

    def _next(self) -> Chunk | None:
        """The next chunk that only NVMe has; None if there is none within LOOK_MAX slots."""
        limit = self._disk.slab.records_max
        for _ in range(min(LOOK_MAX, limit)):
            if self._slot >= limit:
                self._slot = 0
            chunk = self._disk.tier.cold_chunk(self._slot)
            if chunk is not None:
                return chunk
            self._slot += 1
        return None

    def _finish(self, chunk: Chunk, segment: SegmentHeader, completion: Completion) -> None:
        disk, context = self._disk, self._context
        failure: AttnStoreError | None = completion.error
        if completion.error is None and not chunk.dropped:
            where = disk.slab.where(chunk.at(NVME).slot)
            try:
                check_record(self._page, completion.checksum, chunk, segment, where)
            except CorruptRecordError as error:
                failure = error
        with context.progress:
            if failure is None:
                context.residency.counts[Event.SCRUBBED] += 1
            elif not chunk.dropped:
                is_read = completion.error is None
                context.residency.counts[Event.CORRUPT if is_read else Event.READ_FAILED] += 1
                context.residency.drop(chunk)
            context.residency.end_scrub(disk.tier, chunk)
            self._is_reading = False
        disk.health.note_read(failure)
