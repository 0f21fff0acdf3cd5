# SPDX-License-Identifier: Apache-2.0
"""NVMe's bytes: records of the slab file, each read and written whole, in one request.

A record's bytes are used if its header is that of this record, names this chunk and states the
tokens that its key was made from, and if its payload has the checksum that the index has and the
header states. Anything else drops the chunk.

A record is written once; clean data is never rewritten. When no slot is free another segment is
claimed, and only when all are ours something is evicted.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from attnstore_vllm.errors import CorruptRecordError, DeviceError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.io.device import CHECKSUM_BYTES, Completion, Device, Op, Seal
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.disk_requests import DiskRequest, DiskRequests
from attnstore_vllm.store.format import (
    CHECKSUM_AT,
    PAGE_BYTES,
    PAYLOAD_CHECKSUM_AT,
    Header,
    Root,
    SegmentHeader,
)
from attnstore_vllm.store.health import Health
from attnstore_vllm.store.nvme_parts import Disk
from attnstore_vllm.store.recovery import Recovery
from attnstore_vllm.store.reset import DiskReset
from attnstore_vllm.store.scrubber import Scrubber, check_record
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.store.tier_io import Loaded, Stored, TierIo
from attnstore_vllm.types import NVME

logger = logging.getLogger(__name__)

SCRUB_BURST_S = 1.0
_SEALS = (Seal(of=1, at=PAYLOAD_CHECKSUM_AT), Seal(of=0, at=CHECKSUM_AT))
"""The payload's checksum goes into the header, then the header's own."""


class NvmeIo(TierIo):
    """Reads and writes records of one slab file.

    Args:
        depth: requests in flight; at most half of it are writes.
        deadline_s: a request that takes longer puts NVMe out of use for a while.
        scrub_rate: bytes a second for reading cold records again, or None: no scrubbing.
    """

    def __init__(
        self,
        context: Context,
        slab: Slab,
        device: Device,
        depth: int,
        *,
        deadline_s: float,
        scrub_rate: int | None,
    ) -> None:
        super().__init__()
        residency = context.residency
        self.tier = residency.nvme
        self.health = Health(
            "NVMe", str(slab.path), context.progress, residency.counts, context.clock
        )
        self.record_bytes = slab.record_bytes
        requests = DiskRequests(device, deadline_s, context.clock)
        self._disk = disk = Disk(context, residency.nvme, slab, requests, self.health)
        self._context = context
        self.device = device
        self._depths = depth, max(1, depth // 2)
        self._load_pages, self._store_pages = (
            deque(memoryview(mmap.mmap(-1, slab.header_bytes)) for _ in range(count))
            for count in self._depths
        )
        self._outbox: deque[Callable[[], DiskRequest]] = deque()
        # Only the order of records comes from it; a clock that was set back costs order.
        self._sequence = time.time_ns()
        self._is_claiming = False
        for segment in slab.fresh:
            records = slab.records_of(segment)
            self._disk.tier.open(records.start, len(records))
        self.recovery = Recovery(disk)
        self.gauges = self.recovery.gauges
        self.seconds = {
            f"{NVME}_{op.value}_seconds": times for op, times in requests.seconds.items()
        }
        budget = Budget(scrub_rate, SCRUB_BURST_S)
        self._scrubber = Scrubber(disk, budget) if scrub_rate else None

    # ---- what is under way -------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return self._depths[0] - len(self._load_pages)

    @property
    def num_storing(self) -> int:
        return self._depths[1] - len(self._store_pages) + self._is_claiming

    @property
    def can_load(self) -> bool:
        return bool(self._load_pages)

    @property
    def can_store(self) -> bool:
        return bool(self._store_pages)

    @property
    def is_at_rest(self) -> bool:
        return self.recovery.is_over

    def submit(self) -> None:
        requests: list[DiskRequest] = []
        while self._outbox:
            try:
                requests.append(self._outbox.popleft()())
            except IndexError:  # another thread has sent it
                break
        self._disk.requests.submit(requests)

    def poll(self, timeout_s: float) -> bool:
        return self._disk.requests.run(timeout_s)

    def wake(self) -> None:
        self.device.wake()

    def cancel(self) -> None:
        self._disk.requests.cancel_all()

    def close(self, timeout_s: float) -> bool:
        return self.device.close(timeout_s)

    # ---- NVMe -> DRAM ------------------------------------------------------------------

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        slab, slot = self._disk.slab, chunk.at(NVME).slot
        page, segment = self._load_pages.popleft(), slab.segment(slot)
        request = DiskRequest(
            Op.READ,
            partial(self._loaded, chunk, page, segment, done),
            partial(self._give_up, late),
            offset=slab.offset(slot),
            buffers=(page, payload),
            checksum=True,
        )
        self._outbox.append(lambda: request)

    def _loaded(
        self,
        chunk: Chunk,
        page: memoryview,
        segment: SegmentHeader,
        done: Loaded,
        completion: Completion,
    ) -> None:
        failure: DeviceError | CorruptRecordError | None = completion.error
        tokens = b""
        if completion.error is None:
            # Held by this read: neither the slot nor the expected checksum can change.
            copy = chunk.at(NVME)
            where = self._disk.slab.where(copy.slot)
            try:
                header = check_record(page, completion.checksum, chunk, segment, where)
                tokens = header.name.tokens
            except CorruptRecordError as error:
                failure = error
        with self._context.progress:
            self._load_pages.append(page)
            done(failure, tokens)
        self.health.note_read(failure)

    def _give_up(self, late: Callable[[], None]) -> None:
        late()
        self.health.note_hang(Op.READ.value)

    # ---- DRAM -> NVMe ------------------------------------------------------------------

    def must_wait(self) -> bool:
        if self._disk.tier.num_free:
            return False
        if not self._is_claiming:
            claimed = self._disk.slab.claim()
            if claimed is None:
                return False
            self._is_claiming = True
            self._outbox.append(partial(self._claim, claimed))
        return True

    def _claim(self, header: SegmentHeader) -> DiskRequest:
        """The segment's records are used once its header has been written."""
        slab = self._disk.slab

        def done(completion: Completion) -> None:
            with self._context.progress:
                self._is_claiming = False
                if completion.error is None:
                    records = slab.records_of(header.number)
                    self._disk.tier.open(records.start, len(records))
                else:
                    slab.give_back(header.number)
            self.health.note_write(completion.error)

        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        page[:] = header.encode()
        return DiskRequest(
            Op.WRITE, done, self._disk.late(Op.WRITE), slab.segment_offset(header.number), (page,)
        )

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        self._sequence += 1
        slot = chunk.at(NVME).slot
        page, segment = self._store_pages.popleft(), self._disk.slab.segment(slot)
        self._outbox.append(
            partial(self._store, chunk, slot, page, segment, self._sequence, payload, done)
        )

    def _store(
        self,
        chunk: Chunk,
        slot: int,
        page: memoryview,
        segment: SegmentHeader,
        sequence: int,
        payload: memoryview,
        done: Stored,
    ) -> DiskRequest:
        """The header is made without the lock."""
        Header(
            chunk.name,
            segment.namespace,
            segment.generation,
            slot,
            sequence,
            len(payload),
            bytes(CHECKSUM_BYTES),
            int(time.time()),
        ).encode_into(page)
        return DiskRequest(
            Op.WRITE,
            partial(self._stored, page, done),
            self._disk.late(Op.WRITE),
            offset=self._disk.slab.offset(slot),
            buffers=(page, payload),
            seals=_SEALS,
        )

    def _stored(self, page: memoryview, done: Stored, completion: Completion) -> None:
        with self._context.progress:
            self._store_pages.append(page)
            done(completion.checksum if completion.error is None else None)
        self.health.note_write(completion.error)

    def reset(self) -> DiskReset:
        reset = DiskReset(self._disk)
        for request in reset.requests():
            self._outbox.append(partial(_same, request))
        return reset

    # ---- by itself ---------------------------------------------------------------------

    def turn(self) -> None:
        self._probe()
        self.recovery.start()

    def idle_turn(self) -> bool:
        if self._scrubber is None or not self.recovery.is_over:
            return False
        self._scrubber.start()
        return True

    def _probe(self) -> None:
        """Try a direction that is out of use again, one page at a time."""
        now = self._context.clock()
        with self._context.progress:
            reading = self.health.reads.take_probe(now)
            writing = self.health.writes.take_probe(now)
        if reading:
            self._send_probe(Op.READ)
        if writing:
            self._send_probe(Op.WRITE)

    def _send_probe(self, op: Op) -> None:
        """Read the root page, or write it as it is."""
        slab = self._disk.slab
        root = Root(slab.segment_bytes).encode()
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        if op is Op.WRITE:
            page[:] = root

        def done(completion: Completion) -> None:
            failure: DeviceError | CorruptRecordError | None = completion.error
            if failure is None and bytes(page) != root:
                failure = CorruptRecordError(f"{slab.path}, root", "page", "ours", "other")
            (self.health.note_read if op is Op.READ else self.health.note_write)(failure)

        self._disk.requests.submit([DiskRequest(op, done, self._disk.late(op), buffers=(page,))])


def _same(request: DiskRequest) -> DiskRequest:
    return request
