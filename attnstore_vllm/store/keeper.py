# SPDX-License-Identifier: Apache-2.0
"""The store's own thread: everything between DRAM and NVMe, also while the engine sleeps.

It runs the parts in turn (recovery, reads, writes, scrubbing, a probe of a device that is out
of use), waits for completions, and tells the parts. The lock is taken to decide and to note
what has ended, never across I/O or a checksum.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from functools import partial

from attnstore_vllm.errors import CorruptRecordError, DeviceError
from attnstore_vllm.io.device import Completion, Device, Op
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.flights import Transfer
from attnstore_vllm.store.format import PAGE_BYTES, Root
from attnstore_vllm.store.reader import Reader
from attnstore_vllm.store.recovery import Recovery
from attnstore_vllm.store.reset import Reset
from attnstore_vllm.store.scrubber import Scrubber
from attnstore_vllm.store.writer import Writer

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_SCRUB_POLL_S = 0.05
WRITE_BURST_S = 3600.0
SCRUB_BURST_S = 1.0


class Keeper:
    """See the module. Methods marked *locked* are called with the store's lock held.

    Args:
        depth: requests in flight; at most half of it are writes.
        daily_writes: bytes that may be written a day, or None.
        scrub_rate: bytes a second that the scrubber may read, or None: no scrubbing.
        learn: called in every turn: what is slow and not urgent.
    """

    def __init__(
        self,
        context: Context,
        device: Device,
        depth: int,
        *,
        daily_writes: int | None = None,
        scrub_rate: int | None = None,
        learn: Callable[[], None] | None = None,
    ) -> None:
        self._learn = learn
        self.reader = Reader(context, depth)
        rate = daily_writes / 86_400 if daily_writes is not None else None
        self._writer = Writer(context, max(1, depth // 2), Budget(rate, WRITE_BURST_S))
        self._scrubber = (
            Scrubber(context, Budget(scrub_rate, SCRUB_BURST_S)) if scrub_rate else None
        )
        self.recovery = Recovery(context)
        self._context = context
        self._device = device
        self._stopping = False
        self.is_out = False
        """Locked. The thread has ended by an error of ours: NVMe is out of use for good."""
        self._thread = threading.Thread(target=self._run, name="attnstore", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._device.wake()

    def is_idle(self) -> bool:
        """Locked. Nothing dirty and nothing in flight."""
        if self.is_out:
            return True
        return not (self.reader.is_busy or self._has_writes()) and self.recovery.is_over

    def _has_writes(self) -> bool:
        """Locked."""
        return bool(self._context.residency.num_dirty or self._writer.num_writing)

    def stop(self, grace_s: float) -> None:
        """Write back what is dirty, newest first, for up to `grace_s`; then end all."""
        deadline = time.monotonic() + grace_s
        progress = self._context.progress
        with progress:
            self._writer.newest_first = True
            self.reader.forget_wanted()  # nobody waits for it now, and reads go before writes
            while self._has_writes() and self._context.writes.in_use:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                progress.wait(min(0.1, left))
            self._stopping = True
        self._device.wake()
        self._thread.join(max(0.5, deadline - time.monotonic()))
        self._context.flights.cancel_all()
        if not self._device.close(max(0.5, deadline - time.monotonic())):
            logger.warning("the NVMe device still has requests in flight; nobody waits for them")

    def reset(self) -> Reset:
        """Begin a reset; the caller waits for it. From any thread."""
        reset = Reset(self._context)
        with self._context.progress:
            self.reader.forget_wanted()
        reset.start()
        self._device.wake()
        return reset

    # ---- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn(_POLL_S)
        except Exception:
            # The thread's outermost frame: the NVMe tier is out of use, the server goes on.
            logger.exception("AttnStore's NVMe tier stops; DRAM and the server go on")
            with self._context.progress:
                self.is_out = True
                self._stopping = True
                self._context.reads.in_use = self._context.writes.in_use = False
                self._context.residency.lose_nvme()
                self._context.progress.notify_all()

    def turn(self, poll_s: float) -> None:
        """Start what can be started, wait `poll_s` at most for what ends, and note it."""
        self._probe()
        if self._learn is not None:
            self._learn()
        self.recovery.start()
        self.reader.start()
        with self._context.progress:
            reading = self.reader.num_reading > 0
        self._writer.start(reading)
        with self._context.progress:
            self._context.residency.room.writes_stalled = self._writer.num_writing == 0
        if self._scrubber is not None and not reading and self.recovery.is_over:
            self._scrubber.start()
            poll_s = min(poll_s, _SCRUB_POLL_S)
        self._context.flights.run(poll_s)

    def _probe(self) -> None:
        """Try a direction that is out of use again, one page at a time."""
        context = self._context
        now = context.clock()
        with context.progress:
            reading = context.reads.take_probe(now)
            writing = context.writes.take_probe(now)
        if reading:
            self._send_probe(Op.READ)
        if writing:
            self._send_probe(Op.WRITE)

    def _send_probe(self, op: Op) -> None:
        """Read the root page, or write it as it is."""
        context = self._context
        root = Root(context.slab.segment_bytes).encode()
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        if op is Op.WRITE:
            page[:] = root

        def done(completion: Completion) -> None:
            failure: DeviceError | CorruptRecordError | None = completion.error
            if failure is None and bytes(page) != root:
                failure = CorruptRecordError(f"{context.slab.path}, root", "page", "ours", "other")
            (context.note_read if op is Op.READ else context.note_write)(failure)

        context.flights.submit(
            [Transfer(op, done, partial(context.note_hang, op), buffers=(page,))]
        )
