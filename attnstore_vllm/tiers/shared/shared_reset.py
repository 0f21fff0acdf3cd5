# SPDX-License-Identifier: Apache-2.0
"""A reset of the shared tier: what was left is noted on the disk, so that no restart goes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from attnstore_vllm.tiers.context import Context

logger = logging.getLogger(__name__)


class SharedReset:
    """One reset. `is_over` and `succeeded` are read with the store's lock held.

    It waits for the disk alone: whether the store hears of it or not, this engine has left.
    """

    def __init__(self, context: Context, save: Callable[[], None]) -> None:
        self.is_over = self.succeeded = False
        self._context = context
        self._save = save
        threading.Thread(target=self._run, name="attnstore-shared-reset", daemon=True).start()

    def _run(self) -> None:
        try:
            self._save()
            succeeded = True
        except OSError as error:
            logger.error("the reset of the shared tier was not noted on the disk: %s", error)
            succeeded = False
        progress = self._context.progress
        with progress:
            self.is_over, self.succeeded = True, succeeded
            progress.notify_all()
