# SPDX-License-Identifier: Apache-2.0
"""The store's own thread: everything between DRAM and the tiers behind, also while the engine
sleeps.

It runs the parts in turn (what each tier does by itself, reads, writes), waits for what ends, and
tells the parts. The lock is taken to decide and to note what has ended, never across I/O or a
checksum.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.store.auditor import Auditor
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.reader import Reader
from attnstore_vllm.tiers.tier_io import Reset, TierIo
from attnstore_vllm.tiers.writer import Writer

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_IDLE_POLL_S = 0.05
WRITE_BURST_S = 3600.0


class StoreThread:
    """See the module. Methods marked *locked* are called with the store's lock held.

    Args:
        tiers: nearest first. The first one's poll() is where the thread waits.
        audit: None: nothing is compared.
        daily_writes: bytes that may be written to the first a day, or None.
        learn: called in every tick: what is slow and not urgent.
    """

    def __init__(
        self,
        context: Context,
        tiers: Sequence[TierIo],
        audit: Auditor | None = None,
        *,
        daily_writes: int | None = None,
        learn: Callable[[], None] | None = None,
    ) -> None:
        self._context = context
        context.wake = self.wake
        self._learn = learn
        self._audit = audit
        if audit is not None:
            audit.reset = partial(self._reset_for, audit)
        self.tiers = tiers
        self.reader = context.reader = Reader(context, tiers)
        rate = daily_writes / 86_400 if daily_writes is not None else None
        rates = [rate, *(None for _ in tiers[1:])]
        self._writers = [
            Writer(context, tier, Budget(of_tier, WRITE_BURST_S, empty_at=context.steady()))
            for tier, of_tier in zip(tiers, rates, strict=True)
        ]
        self._stopping = False
        self._resets: list[Reset] = []
        """Locked. Those of the last reset."""
        self.is_out = False
        """Locked. The thread has ended by an error of ours: all it moves is out of use for good."""
        self._thread = threading.Thread(target=self._run, name="attnstore", daemon=True)

    def start(self) -> None:
        # A thread that comes back from native code while the interpreter ends aborts the process.
        # What was made later ends first: an engine that closes its store at exit finds it running.
        self._at_exit = weakref.finalize(self._thread, self._end_with, os.getpid())
        self._thread.start()

    def _end_with(self, pid: int) -> None:
        if os.getpid() == pid:  # a fork's child has no thread, and may have a lock that stays held
            self.stop(0.0)

    def wake(self) -> None:
        self.tiers[0].wake()

    def is_idle(self) -> bool:
        """Locked. Nothing in flight, and nothing to write to a tier that is in use."""
        if self.is_out:
            return True
        is_busy = self.reader.is_busy or self.has_writes()
        return not is_busy and all(tier.is_at_rest and not tier.num_storing for tier in self.tiers)

    def stop(self, grace_s: float) -> None:
        """Write back what is dirty, of most worth first, for up to `grace_s`; then end all. A reset
        or an audit that is under way is waited for too: the next start would find what it drops."""
        self._at_exit.detach()
        deadline = time.monotonic() + grace_s
        progress = self._context.progress
        with progress:
            for writer in self._writers:
                writer.is_ending = True
            self.reader.forget_wanted()  # no request waits for it now, and reads go before writes
            while self._must_go_on() and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                progress.wait(min(0.1, left))
            self._stopping = True
        self.wake()
        self._thread.join(max(0.5, deadline - time.monotonic()))
        for tier in self.tiers:
            tier.cancel()
            if not tier.close(max(0.5, deadline - time.monotonic())):
                logger.warning(
                    "%s still has requests in flight; they are not waited for", tier.tier.name
                )

    def has_writes(self) -> bool:
        """Locked. Whether something is still to be written where that is possible."""
        pairs = zip(self.tiers, self._writers, strict=True)
        return any(writer.has_work and tier.health.writes.in_use for tier, writer in pairs)

    def _must_go_on(self) -> bool:
        """Locked. Whether the next start would miss or find what it should not."""
        is_auditing = self._audit is not None and self._audit.is_busy
        is_resetting = not all(reset.is_over for reset in self._resets)
        is_removing = any(tier.num_removing for tier in self.tiers)  # also to one that was late
        return is_auditing or is_resetting or is_removing or self.has_writes()

    def reset(self, *, keeps_aside: bool = False) -> list[Reset]:
        """Begin a reset of all tiers; the caller waits for it. From any thread.

        Args:
            keeps_aside: KV that an audit has kept aside stays.
        """
        with self._context.progress:
            self.reader.forget_wanted()
            if self._audit is not None:
                self._audit.void_all()
                if not keeps_aside:
                    self._audit.remove_kept()
            self._context.residency.drop_all()
            first, *others = self.tiers
            self._context.disk_reset = first.reset()
            self._resets = resets = [self._context.disk_reset, *(tier.reset() for tier in others)]
        for tier in self.tiers:
            tier.submit()
        self.wake()
        return resets

    def _reset_for(self, audit: Auditor) -> None:
        self.reset(keeps_aside=True)
        audit.was_reset = True  # after it: a look of before would say nothing

    def wait_for(self, resets: Sequence[Reset], timeout_s: float) -> bool:
        """Locked. Wait until these are over, or the thread is; and whether they succeeded."""

        def is_over() -> bool:
            return self.is_out or all(reset.is_over for reset in resets)

        self._context.progress.wait_for(is_over, timeout_s)
        return all(reset.succeeded for reset in resets)

    # ---- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.tick(_POLL_S)
        except Exception:
            # The thread's outermost frame: the tiers behind are out of use, the server goes on.
            logger.exception("AttnStore's NVMe tier stops; DRAM and the server go on")
            with self._context.progress:
                self.is_out = True
                self._stopping = True
                for tier in self.tiers:
                    tier.health.end()
                    self._context.residency.lose(tier.tier)
                self._context.progress.notify_all()

    def tick(self, poll_s: float) -> None:
        """Start what can be started, wait `poll_s` at most for what ends, and note it."""
        if self._learn is not None:
            self._learn()
        for tier in self.tiers:
            tier.tick()
        self.reader.start()
        with self._context.progress:
            self._context.residency.dram.place_left()
            reading = self.reader.num_reading > 0
        for writer in self._writers:
            writer.start(reading)
        with self._context.progress:
            is_storing = any(tier.num_storing for tier in self.tiers)
            self._context.residency.dram.writes_stalled = not is_storing
        if not reading:
            for tier in self.tiers:
                if tier.idle_tick():
                    poll_s = min(poll_s, _IDLE_POLL_S)
        if self._audit is not None and self._audit.tick():
            poll_s = 0.0
        announce = self._context.announce
        if announce is not None and announce(all(tier.is_at_rest for tier in self.tiers)):
            poll_s = min(poll_s, _IDLE_POLL_S)
        first, *others = self.tiers
        for tier in others:
            if tier.poll(0.0):
                first.wake()  # what has ended may have made room for more
        first.poll(poll_s)
