# SPDX-License-Identifier: Apache-2.0
"""NVMe -> DRAM: what waiting requests want is read, nearest first, and verified.

    look-ahead -> begin_prefetch -> device -> header and payload verified -> READY, waiters are told

A record is read whole. Its bytes are used if its header is that of this record, names this
chunk and states the tokens that its key was made from, and if its payload has the checksum
that the index has and the header states. Anything else drops the chunk.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import partial

from attnstore_vllm.errors import CorruptRecordError, DeviceError
from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.io.device import Completion, Op
from attnstore_vllm.policy.cost import ReadCost
from attnstore_vllm.policy.lookahead import LAST, Order
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.flights import Transfer
from attnstore_vllm.store.format import Header, SegmentHeader
from attnstore_vllm.types import Flow

WANTED_MAX = 65536
"""Chunks that may be queued for nobody in particular."""


def check_record(
    page: memoryview, checksum: bytes, chunk: Chunk, segment: SegmentHeader, where: str
) -> Header:
    """The header of a record that was read, if it is the chunk's.

    Args:
        checksum: of the payload that came with it.
    Raises: CorruptRecordError.
    """
    header = Header.decode(bytes(page), chunk.nvme_slot, segment, where)
    for field, want, got in (
        ("key", chunk.name.key, header.name.key),
        ("payload checksum in the header", chunk.checksum, header.payload_checksum),
        ("payload checksum", chunk.checksum, checksum),
    ):
        if want != got:
            raise CorruptRecordError(where, field, want.hex(), got.hex())
    return header


class Reader:
    """See the module. Methods marked *locked* are called with the store's lock held."""

    def __init__(self, context: Context, depth: int) -> None:
        self._context = context
        self._wanted: OrderedDict[Chunk, None] = OrderedDict()
        self._pages = deque(
            memoryview(mmap.mmap(-1, context.slab.header_bytes)) for _ in range(depth)
        )
        self._depth = depth
        self.cost = ReadCost()
        """Locked. Of reads that follow each other."""
        self._ended_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Locked."""
        return self.num_reading > 0 or self._next() is not None

    @property
    def num_reading(self) -> int:
        """Locked."""
        return self._depth - len(self._pages)

    def want(self, chunks: Iterable[Chunk]) -> None:
        """Locked. Queue chunks that no waiting request wants, after all that one does."""
        for chunk in chunks:
            if len(self._wanted) < WANTED_MAX:
                self._wanted.setdefault(chunk)

    def arrivals(self, request_id: str, chunks: Sequence[Chunk]) -> list[float] | None:
        """Locked. Seconds until each of a waiting request's chunks is in DRAM, rising; None as long
        as the disk is not known.

        What is in flight and what nearer requests want comes before them; without a place in the
        queue, what was wanted earlier.
        """
        if self.cost.mean_s is None:
            return None
        flying = self.num_reading
        look_ahead = self._context.residency.look_ahead
        ahead = flying + look_ahead.num_absent_before(request_id)
        if request_id not in look_ahead:
            mine = set(chunks)
            ahead += next((i for i, c in enumerate(self._wanted) if c in mine), 0)
        arrivals, latest = [], 0.0
        for chunk in chunks:
            if chunk.dram is Dram.READING:
                latest = max(latest, self.cost.seconds(flying))
            elif chunk.dram is Dram.ABSENT:
                ahead += 1
                latest = self.cost.seconds(ahead)
            arrivals.append(latest)
        return arrivals

    def forget_wanted(self) -> None:
        """Locked."""
        self._wanted.clear()
        self._context.residency.look_ahead.stop_fetching()

    def _next(self) -> tuple[Chunk, Order] | None:
        """Locked. What is to be read next, and for whom."""
        context = self._context
        look_ahead = context.residency.look_ahead
        while context.reads.in_use:
            found = look_ahead.next_to_fetch()
            if found is None and self._wanted:
                found = next(iter(self._wanted)), LAST
            if found is None:
                break
            chunk, whose = found
            assert isinstance(chunk, Chunk)
            if not chunk.dropped and chunk.dram is Dram.ABSENT and chunk.nvme is Nvme.READY:
                return chunk, whose
            self._wanted.pop(chunk, None)
            look_ahead.has_come(chunk)
        return None

    def start(self) -> None:
        """Submit reads up to the depth. From any thread; waits for nothing."""
        transfers: list[Transfer] = []
        context = self._context
        with context.progress:
            context.residency.now = context.clock()
            while self._pages and (found := self._next()) is not None:
                chunk, whose = found
                if not context.residency.begin_prefetch(chunk, whose):
                    break  # no room now: tried again when something has ended
                self._wanted.pop(chunk, None)
                page = self._pages.popleft()
                segment = context.slab.segment(chunk.nvme_slot)
                begun_at = context.residency.now
                transfers.append(
                    Transfer(
                        Op.READ,
                        partial(self._finish, chunk, page, segment, begun_at),
                        partial(self._give_up, chunk),
                        offset=context.slab.offset(chunk.nvme_slot),
                        buffers=(page, context.pool.slot(chunk.dram_slot)),
                        checksum=True,
                    )
                )
        context.flights.submit(transfers)

    def _finish(
        self, chunk: Chunk, page: memoryview, segment: SegmentHeader, begun_at: float,
        completion: Completion,
    ) -> None:  # fmt: skip
        context = self._context
        now = context.clock()
        failure: DeviceError | CorruptRecordError | None = completion.error
        tokens = b""
        if completion.error is None:
            # Held by this read: neither the slot nor the expected checksum can change.
            where = context.slab.where(chunk.nvme_slot)
            try:
                header = check_record(page, completion.checksum, chunk, segment, where)
                tokens = header.name.tokens
            except CorruptRecordError as error:
                failure = error
        with context.progress:
            if completion.error is None:
                num_bytes = len(page) + context.pool.slot_bytes
                context.moved_bytes[Flow.PREFETCH] += num_bytes
                self.cost.observe(now - max(begun_at, self._ended_at))
                self._ended_at = now
            verified = failure is None and context.residency.index.learn(chunk, tokens)
            if not verified and not chunk.dropped:  # else it was counted, or nobody wants it
                event = "read_failed" if completion.error is not None else "corrupt"
                context.residency.counts[event] += 1
            context.residency.finish_prefetch(chunk, verified)
            self._pages.append(page)
            context.progress.notify_all()
        context.note_read(failure)

    def _give_up(self, chunk: Chunk) -> None:
        """The read is late. Whoever waits for the chunk computes."""
        with self._context.progress:
            self._context.residency.counts["read_late"] += 1
            self._context.residency.drop(chunk)
            self._context.progress.notify_all()
        self._context.note_hang(Op.READ)
