# SPDX-License-Identifier: Apache-2.0
"""All stored KV becomes invalid at once: new generations for our segments, synced.

Without the sync a power loss could bring an old generation back.
"""

from __future__ import annotations

import logging
import mmap

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import Completion, Op
from attnstore_vllm.tiers.nvme.disk_requests import DiskRequest
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES
from attnstore_vllm.tiers.nvme.nvme_parts import Disk

logger = logging.getLogger(__name__)


class DiskReset:
    """One reset. `is_over` and `succeeded` are read with the store's lock held."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._left = 0
        self._error: DeviceError | None = None
        self.is_over = False

    @property
    def succeeded(self) -> bool:
        return self.is_over and self._error is None

    def requests(self) -> list[DiskRequest]:
        """Locked, after everything was forgotten: what makes it so on the disk too.

        A write of before that lands after a new header has the old generation: invalid.
        """
        slab = self._disk.slab
        headers = slab.renew()
        self._left = len(headers)
        if not headers:
            return [self._sync()]
        requests: list[DiskRequest] = []
        for header in headers:
            page = memoryview(mmap.mmap(-1, PAGE_BYTES))
            page[:] = header.encode()
            requests.append(
                DiskRequest(
                    Op.WRITE,
                    self._written,
                    self._disk.late(Op.WRITE),
                    offset=slab.segment_offset(header.number),
                    buffers=(page,),
                )
            )
        return requests

    def _written(self, completion: Completion) -> None:
        with self._disk.context.progress:
            self._error = self._error or completion.error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            self._disk.requests.submit([self._sync()])
        else:
            self._end()

    def _sync(self) -> DiskRequest:
        return DiskRequest(Op.SYNC, self._synced, self._disk.late(Op.SYNC))

    def _synced(self, completion: Completion) -> None:
        self._error = completion.error
        self._end()

    def _end(self) -> None:
        if self._error is not None:
            logger.error("the reset did not reach the disk: %s", self._error)
        progress = self._disk.context.progress
        with progress:
            self.is_over = True
            progress.notify_all()
