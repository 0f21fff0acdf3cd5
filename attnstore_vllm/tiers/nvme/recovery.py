# SPDX-License-Identifier: Apache-2.0
"""Recovery of what earlier runs left in our segments: every header is read, many at a time.

Goes on behind serving, in batches: a batch's slots become usable as it ends, and its chunks
are found from then on. A header that is not whole, not ours, or not of its segment's generation
is a free slot. Payloads are not read here: they are verified when they are first wanted.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from functools import partial

import numpy as np
import numpy.typing as npt

from attnstore_vllm.io.checksum import page_checksums
from attnstore_vllm.io.device import Completion, Op
from attnstore_vllm.tiers.nvme.disk_requests import DiskRequest
from attnstore_vllm.tiers.nvme.format import CHECKSUM_AT, SegmentHeader, ages, judge_headers
from attnstore_vllm.tiers.nvme.nvme_parts import Disk
from attnstore_vllm.types import Event

logger = logging.getLogger(__name__)

BATCH_HEADERS = 256
BATCHES = 4
"""In flight, so that the disk always has a deep queue."""


class _Buffer:
    """Memory that a batch is read into. `pages`: its parts, a header each; made once, not per
    batch."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.whole = memoryview(mmap.mmap(-1, num_pages * page_bytes))
        self.pages = tuple(
            self.whole[i * page_bytes : (i + 1) * page_bytes] for i in range(num_pages)
        )


def _rows(raw: memoryview, size: int, chosen: npt.NDArray[np.intp]) -> memoryview:
    """Some of the headers of `size` bytes each."""
    pages = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return memoryview(pages[chosen].tobytes())


class Recovery:
    """One scan of all our segments. Runs on the store's thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._context = context = disk.context
        self._todo: deque[range] = deque()
        for segment in sorted(set(disk.slab.own) - set(disk.slab.fresh)):
            records = disk.slab.records_of(segment)
            for first in range(records.start, records.stop, BATCH_HEADERS):
                self._todo.append(range(first, min(first + BATCH_HEADERS, records.stop)))
        self.num_records = sum(map(len, self._todo))
        size = disk.slab.header_bytes
        self._buffers = [_Buffer(BATCH_HEADERS, size) for _ in range(BATCHES)]
        self._open = 0
        self._started = context.clock()
        self.seconds = 0.0
        self.found = 0
        self.damaged = 0
        self.expired = 0
        self.in_future = 0
        """Expired ones that state a time that has not come."""
        self.gauges = {
            (name, ""): 0.0 for name in ("recovery_seconds", "recovery_records", "recovered_chunks")
        }
        self.is_over = not self._todo
        """Set with the store's lock held, after the last batch was entered."""

    def start(self) -> None:
        """Submit what the buffers allow. Goes on where the device is out of use for a while."""
        requests: list[DiskRequest] = []
        disk, context = self._disk, self._context
        while self._todo and self._buffers and disk.health.reads.in_use:
            records = self._todo.popleft()
            buffer = self._buffers.pop()
            with context.progress:
                segment = disk.slab.segment(records.start)
            requests.append(
                DiskRequest(
                    Op.READ,
                    partial(self._finish, records, buffer, segment),
                    disk.late(Op.READ),
                    offset=disk.slab.offset(records.start),
                    buffers=buffer.pages[: len(records)],
                    stride=disk.slab.record_bytes,
                )
            )
        self._open += len(requests)
        disk.requests.submit(requests)

    def _finish(
        self, records: range, buffer: _Buffer, segment: SegmentHeader, completion: Completion
    ) -> None:
        disk, context = self._disk, self._context
        if completion.error is None:
            self._adopt(records, buffer.whole, segment)
        elif len(records) > 1:  # find the ones that can be read
            middle = len(records) // 2
            self._todo.extendleft((records[middle:], records[:middle]))
        else:
            with context.progress:
                context.residency.counts[Event.READ_FAILED] += 1
                disk.tier.open(records.start, 1)
        self._buffers.append(buffer)
        self._open -= 1
        if completion.error is None or len(records) == 1:
            disk.health.note_read(completion.error)
        if not self._todo and not self._open:
            self._end()

    def _adopt(self, records: range, buffer: memoryview, segment: SegmentHeader) -> None:
        disk, context = self._disk, self._context
        size = disk.slab.header_bytes
        raw = buffer[: len(records) * size]
        numbers = np.arange(records.start, records.stop, dtype=np.int64)
        checksums = page_checksums(raw, size, CHECKSUM_AT)
        valid, damaged = judge_headers(raw, numbers, segment, checksums)
        good, num_damaged = np.flatnonzero(valid), int(damaged.sum())
        if 0 < len(good) < len(records):
            raw = _rows(raw, size, good)
        now = context.clock()
        left_s, num_future = self._left_s(raw[: len(good) * size])
        live = np.flatnonzero(left_s > 0)
        num_expired = len(good) - len(live)
        if num_expired:
            raw, good, left_s = _rows(raw, size, live), good[live], left_s[live]
        if context.found is not None and len(good):
            context.found(raw, size)
        with context.progress:
            # A reset since then has made them invalid.
            if disk.slab.segment(records.start).generation != segment.generation:
                good, num_damaged, num_expired, num_future = good[:0], 0, 0, 0
            context.residency.counts[Event.CORRUPT] += num_damaged
            context.residency.counts[Event.EXPIRED] += num_expired
            self.damaged += num_damaged
            self.expired += num_expired
            self.in_future += num_future
            disk.tier.open(records.start, len(records))
            if len(good):
                slots = numbers[good].astype(np.uint32)
                disk.adopt_stored_bytes(raw, slots)
                may_end = bool(np.isfinite(left_s).any())
                context.has_leases |= may_end
                adopted = disk.tier.adopt(raw, slots, size, left_s + now if may_end else None)
                self.found += adopted.entered - adopted.superseded
                self.gauges["recovered_chunks", ""] = self.found
            context.progress.notify_all()

    def _left_s(self, raw: memoryview) -> tuple[npt.NDArray[np.float64], int]:
        """The seconds that each of these records has left, infinite if it does not expire; and how
        many have none since they are of a time to come: the clock was set back, so how old they are
        is not known."""
        now, limit = self._context.wall(), self._context.ttl_s
        written_at, used_at, ttl_s = ages(raw, self._disk.slab.header_bytes)
        ttl_s = np.minimum(ttl_s, np.inf if limit is None else limit)
        in_future = (written_at > now) & np.isfinite(ttl_s)
        left = np.where(in_future, 0.0, used_at + ttl_s - now)
        return left, int(in_future.sum())

    def _end(self) -> None:
        disk, context = self._disk, self._context
        self.seconds = context.clock() - self._started
        order = disk.tier.adopted()
        with context.progress:
            disk.tier.all_adopted(order, context.clock())
            context.residency.counts[Event.RECOVERED] += self.found
            self.gauges["recovery_seconds", ""] = self.seconds
            self.gauges["recovery_records", ""] = self.num_records
            self.is_over = True
            context.progress.notify_all()
        if self.num_records:
            logger.info(
                "AttnStore found %d chunks of earlier runs in %s (%d records read in %.2f s, "
                "%d of them damaged)",
                self.found,
                disk.slab.path,
                self.num_records,
                self.seconds,
                self.damaged,
            )
        if self.expired:
            logger.info("%d more had not been used for their ttl, and are not found", self.expired)
        if self.in_future:
            logger.warning(
                "%d of these chunks were written at a time that has not come yet: the clock was "
                "set back. How old they are is not known, so they count as expired",
                self.in_future,
            )
