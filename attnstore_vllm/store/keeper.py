# SPDX-License-Identifier: Apache-2.0
"""The store's own thread: everything between DRAM and NVMe.

    read:   want -> begin_prefetch -> device -> verify checksum -> READY, waiters are told
    write:  dirty -> begin_write_back -> checksum, header -> device -> clean

Reads go before writes, and at most half of the depth writes. The lock is taken to decide and
to note what has ended, never across I/O or a checksum. A device error drops the chunk it was
for: its tokens are prefilled again.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from attnstore_vllm.errors import CorruptRecordError, DeviceError
from attnstore_vllm.index.chunk import Chunk, Dram, Nvme
from attnstore_vllm.index.residency import Residency
from attnstore_vllm.io.device import Completion, Device, IoRequest, Op
from attnstore_vllm.store.format import GENERATION_BYTES, PAGE_BYTES, Header, checksum
from attnstore_vllm.store.recovery import scan, v2_pages
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import Flow

logger = logging.getLogger(__name__)

WANTED_MAX = 65536
"""Chunks that may wait for being read; further ones are asked for again by their requests."""
_POLL_S = 0.25


class Keeper:
    """See the module. `progress` is the store's lock; it is notified when something has ended.

    Methods marked *locked* are called with the lock held.
    """

    def __init__(
        self,
        residency: Residency,
        progress: threading.Condition,
        pool: SharedPool,
        slab: Slab,
        device: Device,
        depth: int,
    ) -> None:
        self.moved_bytes: Counter[Flow] = Counter()
        self._residency = residency
        self._progress = progress
        self._pool = pool
        self._slab = slab
        self._device = device
        self._depth = depth
        self._wanted: OrderedDict[Chunk, None] = OrderedDict()
        self._reads: dict[int, tuple[Chunk, memoryview]] = {}
        self._writes: dict[int, tuple[Chunk, bytes, memoryview]] = {}
        self._next_tag = 0
        self._sequence = 0
        self._headers = deque(
            memoryview(mmap.mmap(-1, slab.header_bytes)) for _ in range(max(1, depth // 2))
        )
        self._superblock_page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self._reset_asked = 0
        self._reset_done = 0
        self._reset_ok = True
        self._reset_tag = -1
        self._reset_written = False
        self._recovered = slab.fresh
        self._stopping = False
        self._out = False
        self._thread = threading.Thread(target=self._run, name="attnstore", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Write back what is dirty for up to `grace_s`, then end the thread and the device."""
        deadline = time.monotonic() + grace_s
        with self._progress:
            self._wanted.clear()  # nobody waits for it now, and reads go before writes
            while not self.is_idle() and not self._out:
                if not self._progress.wait(min(0.1, deadline - time.monotonic())):
                    if time.monotonic() >= deadline:
                        break
            self._stopping = True
        self._device.wake()
        self._thread.join(grace_s)
        if not self._thread.is_alive():
            self._device.close()

    def wake(self) -> None:
        self._device.wake()

    def is_idle(self) -> bool:
        """Locked. Nothing dirty and nothing in flight."""
        busy = self._reads or self._writes or self._residency.num_dirty or not self._recovered
        return not busy and self._reset_done == self._reset_asked

    # ---- reads -------------------------------------------------------------------------

    def want(self, chunks: Iterable[Chunk]) -> None:
        """Locked. Queue chunks that are on NVMe only for being read, in this order."""
        for chunk in chunks:
            if len(self._wanted) < WANTED_MAX:
                self._wanted.setdefault(chunk)

    def start_reads(self) -> None:
        """Submit reads up to the depth. From any thread; waits for nothing."""
        requests: list[IoRequest] = []
        with self._progress:
            while self._wanted and len(self._reads) < self._depth and not self._stopping:
                chunk = next(iter(self._wanted))
                if chunk.dropped or chunk.dram is not Dram.ABSENT or chunk.nvme is not Nvme.READY:
                    del self._wanted[chunk]
                    continue
                if not self._residency.begin_prefetch(chunk):
                    break  # no room now: whoever wants it asks again, until its deadline
                del self._wanted[chunk]
                tag = self._new_tag()
                page = memoryview(mmap.mmap(-1, self._slab.header_bytes))
                self._reads[tag] = (chunk, page)
                offset = self._slab.offset(chunk.nvme_slot)
                buffers = (page, self._pool.slot(chunk.dram_slot))
                requests.append(IoRequest(tag, Op.READ, offset, buffers))
        self._submit(requests)

    def _finish_read(self, chunk: Chunk, page: memoryview, error: DeviceError | None) -> None:
        verified, tokens = False, b""
        if error is not None:
            logger.warning("a chunk is lost and will be prefilled again: %s", error)
        else:
            # Held by this read: neither the slot nor the expected checksum can change.
            where = self._slab.where(chunk.nvme_slot)
            found = checksum(self._pool.slot(chunk.dram_slot))
            verified = found == chunk.checksum
            damage = CorruptRecordError(where, "payload checksum", chunk.checksum, found)
            try:
                header = Header.decode(bytes(page), chunk.nvme_slot, self._slab.superblock, where)
                tokens = header.name.tokens
            except CorruptRecordError as bad_header:
                damage, verified = bad_header, False
            if not verified:
                logger.error("%s", damage)
        with self._progress:
            if error is not None:
                self._residency.counts["read_failed"] += 1
            else:
                self.moved_bytes[Flow.PREFETCH] += self._pool.slot_bytes
                if verified and not chunk.name.tokens:
                    verified = self._residency.learn(chunk, tokens)
                if not verified:
                    self._residency.counts["corrupt"] += 1
            self._residency.finish_prefetch(chunk, verified)
            self._progress.notify_all()

    # ---- writes ------------------------------------------------------------------------

    def _start_writes(self) -> None:
        while True:
            with self._progress:
                if not self._may_write():
                    return
                chunk = self._residency.begin_write_back()
                if chunk is None:
                    return
                page = self._headers.popleft()
                tag = self._new_tag()
                self._sequence += 1
                sequence = self._sequence
                generation = self._slab.superblock.generation
            payload = self._pool.slot(chunk.dram_slot)
            digest = checksum(payload)
            header = Header(chunk.name, sequence, len(payload), digest)
            page[:] = header.encode(chunk.nvme_slot, generation, self._slab.superblock.chunk_tokens)
            with self._progress:
                self._writes[tag] = (chunk, digest, page)
            offset = self._slab.offset(chunk.nvme_slot)
            self._submit([IoRequest(tag, Op.WRITE, offset, (page, payload))])

    def _may_write(self) -> bool:
        """Locked. Reads go first, unless so much is dirty that saves would begin to be lost."""
        reading = bool(self._wanted or self._reads)
        pressed = 2 * self._residency.num_dirty > self._pool.num_slots
        resetting = self._reset_asked != self._reset_done
        return (
            bool(self._headers) and self._recovered and not resetting and (pressed or not reading)
        )

    def _finish_write(
        self, chunk: Chunk, digest: bytes, page: memoryview, error: DeviceError | None
    ) -> None:
        if error is not None:
            logger.warning("a chunk stays in DRAM only: %s", error)
        with self._progress:
            if error is None:
                self.moved_bytes[Flow.WRITE_BACK] += len(page) + self._pool.slot_bytes
            self._residency.finish_write_back(chunk, digest if error is None else None)
            self._headers.append(page)
            self._progress.notify_all()

    # ---- reset -------------------------------------------------------------------------

    def ask_for_reset(self) -> int:
        """Locked. Make all records on the disk invalid; returns a ticket for reset_done()."""
        self._wanted.clear()
        self._reset_asked += 1
        self._device.wake()
        return self._reset_asked

    def reset_done(self, ticket: int) -> bool:
        """Locked."""
        return self._reset_done >= ticket or self._out

    def reset_succeeded(self, ticket: int) -> bool:
        return self._reset_done >= ticket and self._reset_ok

    def _start_reset(self) -> None:
        """Write a new superblock, once no write of the old generation is in flight; then sync it.

        Without the sync a power loss could bring the old generation back.
        """
        with self._progress:
            due = self._reset_asked > self._reset_done and self._reset_tag < 0
            if not due or self._writes or not self._recovered:
                return
            on_disk, in_memory = secrets.token_bytes(GENERATION_BYTES), secrets.token_bytes(16)
            page = replace(self._slab.superblock, generation=on_disk).encode()
            # What this process writes from now on may belong to weights that no file has, so
            # it carries a generation that no later start will look for.
            superblock = replace(self._slab.superblock, generation=in_memory)
            self._slab = replace(self._slab, superblock=superblock)
            self._reset_tag = self._new_tag()
        self._reset_written = False
        self._superblock_page[:] = page
        self._submit([IoRequest(self._reset_tag, Op.WRITE, 0, (self._superblock_page,))])

    def _finish_reset(self, error: DeviceError | None) -> None:
        """The reset's write, or its sync, has ended."""
        if error is None and not self._reset_written:
            self._reset_written = True
            with self._progress:
                self._reset_tag = self._new_tag()
            self._submit([IoRequest(self._reset_tag, Op.SYNC)])
            return
        with self._progress:
            if error is not None:
                logger.error("the reset did not reach the disk: %s", error)
            self._reset_ok = error is None
            self._reset_done = self._reset_asked
            self._reset_tag = -1
            self._progress.notify_all()

    # ---- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._recover()
            while not self._stopping:
                self._start_reset()
                self.start_reads()
                self._start_writes()
                for completion in self._device.poll(_POLL_S):
                    self._complete(completion)
        except Exception:
            # The thread's outermost frame: the NVMe tier is out of use, the server goes on.
            logger.exception("AttnStore's NVMe tier stops; DRAM and the server go on")
            with self._progress:
                self._out = True
                self._stopping = True
                self._residency.lose_nvme()
                self._progress.notify_all()

    def _recover(self) -> None:
        if self._recovered:
            return
        started = time.monotonic()
        found = scan(self._slab, self._device, self._depth)
        pages = v2_pages(found.records, self._slab.superblock.chunk_tokens)
        slots = np.array([record for record, _, _ in found.records], np.uint32)
        with self._progress:
            # Recovered records are of before any reset that was asked for meanwhile.
            adopted = 0
            if not self._reset_asked:
                done = self._residency.adopt_headers(
                    memoryview(pages), slots, self._slab.header_bytes
                )
                adopted = done.entered - done.superseded
                self._residency.finish_adoption()
            self._residency.counts["recovered"] += adopted
            self._sequence = found.last_sequence
            self._recovered = True
            self._progress.notify_all()
        seconds = time.monotonic() - started
        logger.info(
            "AttnStore found %d chunks of earlier runs in %s (%d records read in %.2f s)",
            adopted, self._slab.path, self._slab.num_records, seconds,
        )  # fmt: skip

    def _complete(self, completion: Completion) -> None:
        tag, error = completion.tag, completion.error
        if tag == self._reset_tag:
            self._finish_reset(error)
        elif tag in self._reads:
            with self._progress:
                chunk, page = self._reads.pop(tag)
            self._finish_read(chunk, page, error)
        else:
            with self._progress:
                chunk, digest, page = self._writes.pop(tag)
            self._finish_write(chunk, digest, page, error)

    def _new_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag

    def _submit(self, requests: list[IoRequest]) -> None:
        if not requests:
            return
        try:
            self._device.submit(requests)
        except DeviceError as error:
            for request in requests:
                self._complete(Completion(request.tag, error))
