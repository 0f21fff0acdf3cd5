# SPDX-License-Identifier: Apache-2.0
"""DRAM -> NVMe: dirty chunks are written back, within a budget, beside the reads.

    dirty -> begin_write_back -> header -> device (checksums, write) -> clean

A record is written once, whole, in one request; clean data is never rewritten. When no slot is
free another segment is claimed, and only when all are ours something is evicted.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from functools import partial

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.io.device import CHECKSUM_BYTES, Completion, Op, Seal
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.flights import Transfer
from attnstore_vllm.store.format import (
    CHECKSUM_AT,
    PAGE_BYTES,
    PAYLOAD_CHECKSUM_AT,
    Header,
    SegmentHeader,
)
from attnstore_vllm.types import Flow

_SEALS = (Seal(of=1, at=PAYLOAD_CHECKSUM_AT), Seal(of=0, at=CHECKSUM_AT))
"""The payload's checksum goes into the header, then the header's own."""


DIRTY_PART = 8
"""Up to one slot in so many may be dirty while reads go before writes; with more, both go on."""
DIRTY_MIN = 4


class Writer:
    """See the module. Methods marked *locked* are called with the store's lock held."""

    def __init__(self, context: Context, depth: int, budget: Budget) -> None:
        self._context = context
        self._budget = budget
        self._pages = deque(
            memoryview(mmap.mmap(-1, context.slab.header_bytes)) for _ in range(depth)
        )
        self._depth = depth
        # Only the order of records comes from it; a clock that was set back costs order.
        self._sequence = time.time_ns()
        self._is_claiming = False
        self.newest_first = False

    @property
    def num_writing(self) -> int:
        """Locked."""
        return self._depth - len(self._pages) + self._is_claiming

    def start(self, reading: bool) -> None:
        """Submit writes up to the depth. On the keeper's thread.

        Args:
            reading: reads go first, unless so much is dirty that saves would begin to be lost.
        """
        context = self._context
        while True:
            with context.progress:
                limit = max(DIRTY_MIN, context.pool.num_slots // DIRTY_PART)
                pressed = context.residency.num_dirty > limit
                if not self._pages or not context.writes.in_use or (reading and not pressed):
                    return
                if not context.residency.num_dirty:
                    return
                if context.residency.needs_nvme_slots and not self._is_claiming:
                    claimed = context.slab.claim()
                    self._is_claiming = claimed is not None
                else:
                    claimed = None
                if self._is_claiming and claimed is None and context.residency.needs_nvme_slots:
                    return
            if claimed is not None:
                self._write_segment_header(claimed)
                return
            if not self._budget.take(context.clock(), context.slab.record_bytes):
                return
            with context.progress:
                context.residency.now = context.clock()
                chunk = context.residency.begin_write_back(newest_first=self.newest_first)
                if chunk is None:
                    self._budget.give_back(context.slab.record_bytes)
                    return
                page = self._pages.popleft()
                self._sequence += 1
                segment = context.slab.segment(chunk.nvme_slot)
            self._write(chunk, page, segment)

    def _write(self, chunk: Chunk, page: memoryview, segment: SegmentHeader) -> None:
        context = self._context
        payload = context.pool.slot(chunk.dram_slot)
        Header(
            chunk.name, segment.namespace, segment.generation, chunk.nvme_slot, self._sequence,
            len(payload), bytes(CHECKSUM_BYTES), int(time.time()),
        ).encode_into(page)  # fmt: skip
        context.flights.submit(
            [
                Transfer(
                    Op.WRITE,
                    partial(self._finish, chunk, page),
                    partial(context.note_hang, Op.WRITE),
                    offset=context.slab.offset(chunk.nvme_slot),
                    buffers=(page, payload),
                    seals=_SEALS,
                )
            ]
        )

    def _finish(self, chunk: Chunk, page: memoryview, completion: Completion) -> None:
        context = self._context
        digest = completion.checksum if completion.error is None else None
        with context.progress:
            if digest is not None:
                context.moved_bytes[Flow.WRITE_BACK] += len(page) + context.pool.slot_bytes
            context.residency.finish_write_back(chunk, digest)
            self._pages.append(page)
            context.progress.notify_all()
        context.note_write(completion.error)

    def _write_segment_header(self, header: SegmentHeader) -> None:
        """The segment's records are used once it has been written."""
        context = self._context

        def done(completion: Completion) -> None:
            with context.progress:
                self._is_claiming = False
                if completion.error is None:
                    records = context.slab.records_of(header.number)
                    context.residency.open_nvme_slots(records.start, len(records))
                else:
                    context.slab.give_back(header.number)
            context.note_write(completion.error)

        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        page[:] = header.encode()
        context.flights.submit(
            [
                Transfer(
                    Op.WRITE,
                    done,
                    partial(context.note_hang, Op.WRITE),
                    offset=context.slab.segment_offset(header.number),
                    buffers=(page,),
                )
            ]
        )
