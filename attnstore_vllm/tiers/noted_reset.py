# SPDX-License-Identifier: Apache-2.0
"""Resets of remote tiers, which end once they are noted on the disk.

A generation is a name of the last reset that all KV of an engine comes after. Who has another one
gets no KV from it. A reset is over once the next one is on the disk, so that no restart goes back.

How an engine learns of the resets of others differs, and with it all else. Engines of a host meet
in a file, which they lock and trust (peers/generation.py). Servers meet in a network store, which
may lose the name or be given an old one: so theirs are counted and sealed
(shared/shared_generation.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from attnstore_vllm.tiers.context import Context

logger = logging.getLogger(__name__)

DISK_S = 60.0
"""A reset of NVMe that takes longer has failed."""


class NotedReset:
    """One reset. `is_over` and `succeeded` are read with the store's lock held.

    It waits for the disk alone, on a thread of its own. First for NVMe: a process that is killed
    must not come back with KV of before a reset and the generation of after it.

    Args:
        of: the tier, in words.
        note: makes the reset durable. Raises OSError, also if nothing could be noted.
        give_up: called in its place where NVMe's reset has failed, or one that came meanwhile.
    """

    def __init__(
        self,
        context: Context,
        of: str,
        note: Callable[[], None],
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_over = self.succeeded = False
        self._context = context
        self._of = of
        self._note, self._give_up = note, give_up
        threading.Thread(target=self._run, name="attnstore-reset", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._context.progress:
                self._context.progress.wait_for(self._disk_is_over, DISK_S)
                disk = self._context.disk_reset
                if disk is not None and not disk.succeeded:
                    self._give_up()
                    raise OSError("NVMe may still have KV of before")
            self._note()
            succeeded = True
        except OSError as error:
            logger.error("the reset of %s was not noted on the disk: %s", self._of, error)
            succeeded = False
        progress = self._context.progress
        with progress:
            self.is_over, self.succeeded = True, succeeded
            progress.notify_all()

    def _disk_is_over(self) -> bool:
        """The last one's: what was noted before it is over might be of before it."""
        return self._context.disk_reset is None or self._context.disk_reset.is_over
