# SPDX-License-Identifier: Apache-2.0
"""Things that the parts of the NVMe tier share: its books, its file, its requests and how it is
doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from attnstore_vllm.index.nvme_tier import NvmeTier
from attnstore_vllm.io.device import Op
from attnstore_vllm.store.context import Context
from attnstore_vllm.store.disk_requests import DiskRequests
from attnstore_vllm.store.health import Health
from attnstore_vllm.store.slab import Slab


@dataclass(slots=True)
class Disk:
    context: Context
    tier: NvmeTier
    slab: Slab
    requests: DiskRequests
    health: Health

    def late(self, op: Op) -> Callable[[], None]:
        """For DiskRequest: the disk hangs."""
        return partial(self.health.note_hang, op.value)
