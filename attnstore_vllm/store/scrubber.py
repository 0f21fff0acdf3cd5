# SPDX-License-Identifier: Apache-2.0
"""Cold records are read again now and then, so that rot is found before a request needs them.

One record at a time, in the order of the file, within a bandwidth budget, and only while
nobody reads. A record that is not right is dropped and counted, as if it had been asked for.
"""

from __future__ import annotations

import mmap
from functools import partial

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.io.device import Completion, Op
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.flights import Transfer
from attnstore_vllm.store.format import SegmentHeader
from attnstore_vllm.store.reader import check_record

LOOK_MAX = 256
"""Slots that one call looks at for a record to read."""


class Scrubber:
    """Runs on the keeper's thread."""

    def __init__(self, context: Context, budget: Budget) -> None:
        self._context = context
        self._budget = budget
        self._slot = 0
        self._page = memoryview(mmap.mmap(-1, context.slab.header_bytes))
        self._payload = memoryview(mmap.mmap(-1, context.pool.slot_bytes))
        self._is_reading = False

    def start(self) -> None:
        """Read the next cold record, if the budget has room for it."""
        context = self._context
        if self._is_reading or not context.reads.in_use:
            return
        with context.progress:
            chunk = self._next()
            if chunk is None:
                return
            if not self._budget.take(context.clock(), context.slab.record_bytes):
                return
            context.residency.begin_scrub(chunk)
            segment = context.slab.segment(chunk.nvme_slot)
        self._slot = chunk.nvme_slot + 1
        self._is_reading = True
        context.flights.submit(
            [
                Transfer(
                    Op.READ,
                    partial(self._finish, chunk, segment),
                    partial(context.note_hang, Op.READ),
                    offset=context.slab.offset(chunk.nvme_slot),
                    buffers=(self._page, self._payload),
                    checksum=True,
                )
            ]
        )

    def _next(self) -> Chunk | None:
        """The next chunk that only NVMe has; None if there is none within LOOK_MAX slots."""
        limit = self._context.slab.records_max
        for _ in range(min(LOOK_MAX, limit)):
            if self._slot >= limit:
                self._slot = 0
            chunk = self._context.residency.cold_chunk(self._slot)
            if chunk is not None:
                return chunk
            self._slot += 1
        return None

    def _finish(self, chunk: Chunk, segment: SegmentHeader, completion: Completion) -> None:
        context = self._context
        failure: AttnStoreError | None = completion.error
        if completion.error is None and not chunk.dropped:
            where = context.slab.where(chunk.nvme_slot)
            try:
                check_record(self._page, completion.checksum, chunk, segment, where)
            except CorruptRecordError as error:
                failure = error
        with context.progress:
            if failure is None:
                context.residency.counts["scrubbed"] += 1
            elif not chunk.dropped:
                event = "read_failed" if completion.error is not None else "corrupt"
                context.residency.counts[event] += 1
                context.residency.drop(chunk)
            context.residency.end_scrub(chunk)
            self._is_reading = False
        context.note_read(failure)
