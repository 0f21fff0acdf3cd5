# SPDX-License-Identifier: Apache-2.0
"""NVMe's bytes: records of the slab file, each read and written whole, in one request.

It is long since reads, writes and encodings of a record share its place and its end.

A record's bytes are used if its header is that of this record, names this chunk and states the
tokens that its key was made from, and if its payload has the checksum that the index has and the
header states. Anything else drops the chunk.

Where the file's records are encoded (io/codec.py), a payload is encoded before it is written and
decoded after it was read, on threads of their own. The checksum is that of the encoded bytes; they
begin with that of the payload, which is compared too.

A record is written once; clean data is never rewritten. When no slot is free another segment is
claimed, and only when all are ours something is evicted.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError, DeviceError
from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.io.codec import CODECS, Codec, Coders
from attnstore_vllm.io.device import CHECKSUM_BYTES, Completion, Device, Op, Seal
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.nvme.codec_watch import CodecWatch
from attnstore_vllm.tiers.nvme.disk_requests import DiskRequest, DiskRequests
from attnstore_vllm.tiers.nvme.format import (
    CHECKSUM_AT,
    PAGE_BYTES,
    PAYLOAD_CHECKSUM_AT,
    SECONDS_MAX,
    Header,
    Root,
    SegmentHeader,
    pages,
)
from attnstore_vllm.tiers.nvme.nvme_parts import Disk
from attnstore_vllm.tiers.nvme.recovery import Recovery
from attnstore_vllm.tiers.nvme.reset import DiskReset
from attnstore_vllm.tiers.nvme.scrubber import Scrubber, check_record
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.tier_io import Loaded, Stored, TierIo
from attnstore_vllm.types import NVME, StoreFailure

logger = logging.getLogger(__name__)

SCRUB_BURST_S = 1.0
_SEALS = (Seal(of=1, at=PAYLOAD_CHECKSUM_AT), Seal(of=0, at=CHECKSUM_AT))
"""The payload's checksum goes into the header, then the header's own."""


CODER_THREADS_MAX = 4


class _Frame(NamedTuple):
    """Memory that one request takes beside the chunk's slot of DRAM."""

    page: memoryview
    """The record's header."""
    encoded: memoryview | None
    """Room for the payload as it is on the disk; None: it is there as it is in DRAM."""


def _frames(slab: Slab, count: int) -> deque[_Frame]:
    encoding = slab.shape.encoding
    return deque(
        _Frame(
            memoryview(mmap.mmap(-1, slab.header_bytes)),
            None if encoding is None else memoryview(mmap.mmap(-1, pages(encoding.num_bytes))),
        )
        for _ in range(count)
    )


def _coders(slab: Slab, codec: Codec | None) -> Coders | None:
    """Threads for the codec of the file's records: half of the processors, at most."""
    encoding = slab.shape.encoding
    if encoding is None:
        return None
    assert codec is None or codec.name == encoding.codec, "the file's records are of another codec"
    codec = codec or CODECS[encoding.codec]
    processors = len(os.sched_getaffinity(0))
    return Coders(codec, max(1, min(CODER_THREADS_MAX, processors // 2)))


def _age(run: Run, now: float) -> tuple[int, int]:
    """Whole seconds since the run used its chunks, and its time to live, as records have them:
    rounded so that no chunk lives longer in the next process than in this one."""
    lease = run.lease
    used_at = run.since if lease is None else lease.expires - lease.ttl_s
    unused_s = min(max(0, math.ceil(now - used_at)), SECONDS_MAX)
    ttl_s = 0 if lease is None else min(max(1, int(lease.ttl_s)), SECONDS_MAX)
    return unused_s, ttl_s


class NvmeIo(TierIo):
    """Reads and writes records of one slab file.

    Args:
        depth: requests in flight; at most half of it are writes.
        deadline_s: a request that takes longer puts NVMe out of use for a while.
        codec: of the file's records, if it has to know the model.
        scrub_rate: bytes a second for reading cold records again, or None: no scrubbing.
    """

    def __init__(
        self,
        context: Context,
        slab: Slab,
        device: Device,
        depth: int,
        codec: Codec | None = None,
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
        self._load_frames, self._store_frames = (_frames(slab, n) for n in self._depths)
        self._coders = _coders(slab, codec)
        self.sums_payloads = self._coders is None
        coders, clock = self._coders, context.clock
        self.codec_watch = None if coders is None else CodecWatch(coders, slab.path, clock)
        self._read_ended_at = 0.0
        self._outbox: deque[Callable[[], DiskRequest | None]] = deque()
        # Only the order of records comes from it; a clock that was set back costs order.
        self._sequence = int(context.wall() * 1e9)
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
        return self._depths[0] - len(self._load_frames)

    @property
    def num_storing(self) -> int:
        busy = self._depths[1] - len(self._store_frames)
        return busy + self._is_claiming + self.num_removing

    @property
    def can_load(self) -> bool:
        return bool(self._load_frames)

    @property
    def can_store(self) -> bool:
        return bool(self._store_frames)

    @property
    def is_at_rest(self) -> bool:
        return self.recovery.is_over

    def submit(self) -> None:
        requests: list[DiskRequest] = []
        while self._outbox:
            try:
                begin = self._outbox.popleft()
            except IndexError:  # another thread has sent it
                break
            request = begin()
            if request is not None:  # else it is sent when its payload is encoded
                requests.append(request)
        self._disk.requests.submit(requests)

    def poll(self, timeout_s: float) -> bool:
        return self._disk.requests.run(timeout_s)

    def wake(self) -> None:
        self.device.wake()

    def cancel(self) -> None:
        self._disk.requests.cancel_all()

    def close(self, timeout_s: float) -> bool:
        """Coders first: a job of theirs ends with a request to the device."""
        deadline = time.monotonic() + timeout_s
        has_ended = self._coders is None or self._coders.close(timeout_s)
        return self.device.close(max(0.0, deadline - time.monotonic())) and has_ended

    # ---- NVMe -> DRAM ------------------------------------------------------------------

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        slab, slot = self._disk.slab, chunk.at(NVME).slot
        frame, segment = self._load_frames.popleft(), slab.segment(slot)
        read = payload if frame.encoded is None else frame.encoded[: self._disk.stored_bytes(slot)]
        request = DiskRequest(
            Op.READ,
            partial(self._loaded, chunk, frame, segment, payload, done, self._context.clock()),
            partial(self._give_up, late),
            offset=slab.offset(slot),
            buffers=(frame.page, read),
            checksum=True,
        )
        self._outbox.append(lambda: request)

    def _loaded(
        self,
        chunk: Chunk,
        frame: _Frame,
        segment: SegmentHeader,
        payload: memoryview,
        done: Loaded,
        begun_at: float,
        completion: Completion,
    ) -> None:
        read_at, before = self._context.clock(), self._read_ended_at
        self._read_ended_at = read_at
        failure: DeviceError | CorruptRecordError | None = completion.error
        tokens = b""
        if completion.error is None:
            # Held by this read: neither the slot nor the expected checksum can change.
            copy = chunk.at(NVME)
            where = self._disk.slab.where(copy.slot)
            try:
                header = check_record(frame.page, completion.checksum, chunk, segment, where)
                tokens = header.name.tokens
                if self._coders is not None and self.codec_watch is not None:
                    if begun_at < before:
                        self.codec_watch.read(read_at - before, header.stored_bytes)
                    decode = partial(self._decode, frame, header, where, payload, done)
                    self._coders.submit(decode)
                    return
            except CorruptRecordError as error:
                failure = error
        self._end_load(frame, failure, tokens, done)

    def _decode(
        self, frame: _Frame, header: Header, where: str, payload: memoryview, done: Loaded
    ) -> None:
        """On a thread of the codec."""
        assert self._coders is not None
        assert self.codec_watch is not None
        assert frame.encoded is not None
        assert header.encoding is not None
        codec, encoded = self._coders.codec, frame.encoded[: header.encoding.num_bytes]
        is_fast = codec.is_fast(encoded)
        failure, begun_at = None, self._context.clock()
        if not self._coders.decode(encoded, payload):
            failure = CorruptRecordError(where, "encoding", codec.name, "other bytes")
        seconds = self._context.clock() - begun_at
        self.codec_watch.decoded(is_fast, seconds, len(payload), len(encoded))
        self._end_load(frame, failure, header.name.tokens, done)
        self.wake()

    def _end_load(
        self,
        frame: _Frame,
        failure: DeviceError | CorruptRecordError | None,
        tokens: bytes,
        done: Loaded,
    ) -> None:
        with self._context.progress:
            self._load_frames.append(frame)
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
        slot, (clock, now) = chunk.at(NVME).slot, self._context.clock_and_wall()
        frame, segment = self._store_frames.popleft(), self._disk.slab.segment(slot)
        header = Header(
            chunk.name,
            segment.namespace,
            segment.generation,
            slot,
            self._sequence,
            len(payload),
            bytes(CHECKSUM_BYTES),
            int(now),
            segment.encoding,
            chunk.is_alone,
            *_age(chunk.run, clock + (int(now) - now)),
        )
        begin = self._store if self._coders is None else self._begin_encoding
        self._outbox.append(partial(begin, frame, header, payload, done))

    def _store(
        self, frame: _Frame, header: Header, stored: memoryview, done: Stored
    ) -> DiskRequest:
        """The header is made without the lock."""
        header.encode_into(frame.page)
        return DiskRequest(
            Op.WRITE,
            partial(self._stored, frame, header, done),
            self._disk.late(Op.WRITE),
            offset=self._disk.slab.offset(header.record),
            buffers=(frame.page, stored),
            seals=_SEALS,
        )

    def _begin_encoding(
        self, frame: _Frame, header: Header, payload: memoryview, done: Stored
    ) -> None:
        assert self._coders is not None
        self._coders.submit(partial(self._encode, frame, header, payload, done))

    def _encode(self, frame: _Frame, header: Header, payload: memoryview, done: Stored) -> None:
        """On a thread of the codec."""
        assert self._coders is not None
        assert self.codec_watch is not None
        assert frame.encoded is not None
        assert header.encoding is not None
        room, fast = header.encoding.num_bytes, self.codec_watch.is_fast
        size = self._coders.encode(payload, frame.encoded[:room], header.name.num_tokens, fast)
        if not size:
            failure = StoreFailure.FAILED if size is None else StoreFailure.DOES_NOT_FIT
            self._not_stored(frame, room, failure, done)
            return
        end = pages(size)
        frame.encoded[size:end] = bytes(end - size)  # what another chunk has left there
        encoded = replace(header, encoding=header.encoding._replace(num_bytes=size))
        self._disk.requests.submit([self._store(frame, encoded, frame.encoded[:end], done)])

    def _not_stored(self, frame: _Frame, room: int, failure: StoreFailure, done: Stored) -> None:
        """The codec gave nothing that could be sent to the disk."""
        with self._context.progress:
            self._store_frames.append(frame)
            done(failure)
            is_first = self._context.residency.counts[failure.value] == 1
        self.wake()
        if is_first and failure is StoreFailure.DOES_NOT_FIT:
            logger.warning(
                "A chunk takes more than the %d bytes that records of %s have for what "
                "nvme.codec makes of it; such chunks stay in DRAM only (event does_not_fit)",
                room,
                self._disk.slab.path,
            )

    def _stored(self, frame: _Frame, header: Header, done: Stored, completion: Completion) -> None:
        with self._context.progress:
            self._store_frames.append(frame)
            self._disk.set_stored_bytes(header)
            done(completion.checksum if completion.error is None else StoreFailure.FAILED)
        self.health.note_write(completion.error)

    def forget(self, chunk: Chunk, failed: Callable[[], object]) -> None:
        """Zeros take the place of its header. A power loss right then may bring it back."""
        copy, residency = chunk.at(NVME), self._context.residency
        if copy.state is not State.READY:
            return
        residency.begin_scrub(self.tier, chunk)
        self.num_removing += 1
        page = memoryview(mmap.mmap(-1, self._disk.slab.header_bytes))

        def done(completion: Completion) -> None:
            with self._context.progress:
                residency.end_scrub(self.tier, chunk)
                self.num_removing -= 1
            self.health.note_write(completion.error)
            if completion.error is not None:
                logger.error(
                    "all tiers begin anew: what an audit found wrong stays on NVMe: %s",
                    completion.error,
                )
                failed()

        offset, late = self._disk.slab.offset(copy.slot), self._disk.late(Op.WRITE)
        request = DiskRequest(Op.WRITE, done, late, offset, (page,))
        self._outbox.append(partial(_same, request))

    def reset(self) -> DiskReset:
        reset = DiskReset(self._disk)
        for request in reset.requests():
            self._outbox.append(partial(_same, request))
        return reset

    # ---- by itself ---------------------------------------------------------------------

    def tick(self) -> None:
        self._probe()
        self.recovery.start()

    def idle_tick(self) -> bool:
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

    def _probed(self, op: Op, failure: AttnStoreError | None) -> None:
        """One page has shown how the disk is."""
        (self.health.note_read if op is Op.READ else self.health.note_write)(failure)

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
            self._probed(op, failure)

        self._disk.requests.submit([DiskRequest(op, done, self._disk.late(op), buffers=(page,))])


def _same(request: DiskRequest) -> DiskRequest:
    return request
