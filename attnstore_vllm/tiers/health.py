# SPDX-License-Identifier: Apache-2.0
"""How a tier is doing: what fails is counted and said, and a tier that fails is left alone."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from errno import EDQUOT, ENOSPC

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError, DeviceError
from attnstore_vllm.policy.breaker import Breaker
from attnstore_vllm.types import Clock, Event

logger = logging.getLogger(__name__)

LOG_PAUSE_S = 10.0
"""Between two log lines about failures of one kind; the counters have all of them."""
FULL = (ENOSPC, EDQUOT)


class Health:
    """The health of one tier.

    Args:
        label: what the tier is called in the log.
        where: its file, or its address.
        progress: the store's lock.
        events: what a late answer and its being put out of use count as.
    """

    def __init__(
        self,
        label: str,
        where: str,
        progress: threading.Condition,
        counts: Counter[str],
        clock: Clock,
        events: tuple[Event, Event] = (Event.DEVICE_LATE, Event.DEVICE_OUT),
    ) -> None:
        self.reads = Breaker()
        self.writes = Breaker()
        self._label = label
        self._where = where
        self._progress = progress
        self._counts = counts
        self._clock = clock
        self._late, self._out = events
        self._logged_at: dict[str, float] = {}
        self._why_out = ""
        """The last failed look's reason."""

    def note_read(self, failure: AttnStoreError | None) -> None:
        """A read has ended. Wrong bytes are the record's fault, not the device's."""
        self._note("reads", self.reads, failure, "a chunk is lost, its tokens are computed again")

    def note_write(self, failure: AttnStoreError | None) -> None:
        self._note("writes", self.writes, failure, "a chunk stays in DRAM only")

    def note_hang(self, what: str) -> None:
        """A request is late: the device hangs, for both directions."""
        now = self._clock()
        with self._progress:
            self._counts[self._late] += 1
            out = [self.reads.failure(now, hung=True), self.writes.failure(now, hung=True)]
            self._counts[self._out] += any(out)
            self._progress.notify_all()
        if any(out):
            logger.error(
                "%s does not answer: a %s is overdue. %s is out of use, the server computes; "
                "it is tried again later",
                self._where,
                what,
                self._label,
            )

    def note_look(self, failure: AttnStoreError | None) -> None:
        """A look whether the tier answers at all has ended. One that failed is for both
        directions, and its reason is told once."""
        if failure is None:
            self._why_out = ""
            self.note_read(None)
            if not self.writes.in_use:
                self.note_write(None)
            return
        now, why_out = self._clock(), str(failure)
        with self._progress:
            out = [which.failure(now, hung=True) for which in (self.reads, self.writes)]
            self._counts[self._out] += any(out)
            self._progress.notify_all()
        if why_out != self._why_out:
            self._why_out = why_out
            logger.error(
                "%s (%s) is out of use: %s; the server goes on without it, it is tried again later",
                self._label,
                self._where,
                failure,
            )

    def end(self) -> None:
        """Locked. The tier is out of use for good."""
        self.reads.in_use = self.writes.in_use = False

    def _note(self, what: str, breaker: Breaker, failure: AttnStoreError | None, cost: str) -> None:
        now = self._clock()
        with self._progress:
            if failure is None or isinstance(failure, CorruptRecordError):
                changed = breaker.success()
            else:
                changed = breaker.failure(now)
                if isinstance(failure, DeviceError) and failure.errno in FULL:
                    self._counts[Event.DEVICE_FULL] += 1
                if changed:
                    self._counts[self._out] += 1
            if changed:  # what has ended was told where it ended
                self._progress.notify_all()
        if failure is None:
            if changed:
                logger.warning("%s works again: %s %s go on", self._where, self._label, what)
        elif isinstance(failure, CorruptRecordError):
            self._log(logging.ERROR, "corrupt", cost, failure)
        elif changed:
            logger.error(
                "%s %s are out of use after repeated failures, the server goes on without "
                "them; they are tried again later. The last: %s",
                self._label,
                what,
                failure,
            )
        else:
            self._log(logging.WARNING, what, cost, failure)

    def _log(self, level: int, what: str, cost: str, failure: AttnStoreError) -> None:
        now = self._clock()
        if now - self._logged_at.get(what, -LOG_PAUSE_S) >= LOG_PAUSE_S:
            self._logged_at[what] = now
            logger.log(level, "%s: %s", cost, failure)
