# SPDX-License-Identifier: Apache-2.0
"""What the parts of the store share: the tiers, the lock, the device, and how it is doing."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError
from attnstore_vllm.index.residency import Residency
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.breaker import Breaker
from attnstore_vllm.store.flights import Flights
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.types import Flow

logger = logging.getLogger(__name__)

LOG_PAUSE_S = 10.0
"""Between two log lines about failures of one kind; the counters have all of them."""


class Pool(Protocol):
    """The DRAM tier's slots: transfer/pool.py, or a simulation's."""

    num_slots: int
    slot_bytes: int

    def slot(self, slot: int) -> memoryview: ...
    def close(self) -> None: ...


class Context:
    """`progress` is the store's one lock; it is notified when something has ended."""

    def __init__(
        self,
        residency: Residency,
        progress: threading.Condition,
        pool: Pool,
        slab: Slab,
        flights: Flights,
        clock: Callable[[], float],
    ) -> None:
        self.residency = residency
        self.progress = progress
        self.pool = pool
        self.slab = slab
        self.flights = flights
        self.clock = clock
        self.moved_bytes: Counter[Flow] = Counter()
        self.reads = Breaker()
        self.writes = Breaker()
        self._logged_at: dict[str, float] = {}

    def note_read(self, failure: AttnStoreError | None) -> None:
        """A read has ended. Wrong bytes are the record's fault, not the device's."""
        self._note("reads", self.reads, failure, "a chunk is lost, its tokens are computed again")

    def note_write(self, failure: AttnStoreError | None) -> None:
        self._note("writes", self.writes, failure, "a chunk stays in DRAM only")

    def note_hang(self, op: Op) -> None:
        """A request is late: the device hangs, for both directions."""
        now = self.clock()
        with self.progress:
            self.residency.counts["device_late"] += 1
            out = [self.reads.failure(now, hung=True), self.writes.failure(now, hung=True)]
            self.residency.counts["device_out"] += any(out)
            self.progress.notify_all()
        if any(out):
            logger.error(
                "%s does not answer: a %s is overdue. NVMe is out of use, the server computes; "
                "it is tried again later", self.slab.path, op.value,
            )  # fmt: skip

    def _note(self, what: str, breaker: Breaker, failure: AttnStoreError | None, cost: str) -> None:
        now = self.clock()
        with self.progress:
            if failure is None or isinstance(failure, CorruptRecordError):
                changed = breaker.success()
            else:
                changed = breaker.failure(now)
                if changed:
                    self.residency.counts["device_out"] += 1
            self.progress.notify_all()
        if failure is None:
            if changed:
                logger.warning("%s works again: NVMe %s go on", self.slab.path, what)
        elif isinstance(failure, CorruptRecordError):
            self._log(logging.ERROR, "corrupt", cost, failure)
        elif changed:
            logger.error(
                "NVMe %s are out of use after repeated failures, the server goes on without "
                "them; they are tried again later. The last: %s", what, failure,
            )  # fmt: skip
        else:
            self._log(logging.WARNING, what, cost, failure)

    def _log(self, level: int, what: str, cost: str, failure: AttnStoreError) -> None:
        now = self.clock()
        if now - self._logged_at.get(what, -LOG_PAUSE_S) >= LOG_PAUSE_S:
            self._logged_at[what] = now
            logger.log(level, "%s: %s", cost, failure)
