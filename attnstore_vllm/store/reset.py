# SPDX-License-Identifier: Apache-2.0
"""All stored KV becomes invalid at once: new generations for our segments, synced.

Without the sync a power loss could bring an old generation back.
"""

from __future__ import annotations

import logging
import mmap
from functools import partial

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import Completion, Op
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.flights import Transfer
from attnstore_vllm.store.format import PAGE_BYTES

logger = logging.getLogger(__name__)


class Reset:
    """One reset. `is_over` and `succeeded` are read with the store's lock held."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._left = 0
        self._error: DeviceError | None = None
        self.is_over = False

    @property
    def succeeded(self) -> bool:
        return self.is_over and self._error is None

    def start(self) -> None:
        """Forget everything and write the new headers. From any thread; waits for nothing.

        A write of before that lands after a new header has the old generation: invalid.
        """
        context = self._context
        with context.progress:
            context.residency.drop_all()
            headers = context.slab.renew()
            self._left = len(headers)
        if not headers:
            self._sync()
            return
        transfers: list[Transfer] = []
        for header in headers:
            page = memoryview(mmap.mmap(-1, PAGE_BYTES))
            page[:] = header.encode()
            transfers.append(
                Transfer(
                    Op.WRITE,
                    self._written,
                    partial(context.note_hang, Op.WRITE),
                    offset=context.slab.segment_offset(header.number),
                    buffers=(page,),
                )
            )
        context.flights.submit(transfers)

    def _written(self, completion: Completion) -> None:
        with self._context.progress:
            self._error = self._error or completion.error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            self._sync()
        else:
            self._end()

    def _sync(self) -> None:
        late = partial(self._context.note_hang, Op.SYNC)
        self._context.flights.submit([Transfer(Op.SYNC, self._synced, late)])

    def _synced(self, completion: Completion) -> None:
        self._error = completion.error
        self._end()

    def _end(self) -> None:
        if self._error is not None:
            logger.error("the reset did not reach the disk: %s", self._error)
        with self._context.progress:
            self.is_over = True
            self._context.progress.notify_all()
