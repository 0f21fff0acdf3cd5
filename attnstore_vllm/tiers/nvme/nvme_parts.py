# SPDX-License-Identifier: Apache-2.0
"""Things that the parts of the NVMe tier share: the tier, its file, its requests and how it is
doing."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from attnstore_vllm.io.device import Op
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.nvme.disk_requests import DiskRequests
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, Header, encoded_bytes
from attnstore_vllm.tiers.nvme.nvme_tier import NvmeTier
from attnstore_vllm.tiers.nvme.slab import Slab


@dataclass(slots=True)
class Disk:
    context: Context
    tier: NvmeTier
    slab: Slab
    requests: DiskRequests
    health: Health
    lengths: array[int] = field(init=False)
    """Pages of each record's payload on the disk; empty where all have the same."""

    def __post_init__(self) -> None:
        count = self.slab.records_max if self.slab.shape.encoding is not None else 0
        self.lengths = array("I", [0]) * count

    def stored_bytes(self, slot: int) -> int:
        """Locked. Bytes to read of a slot's payload."""
        if not self.lengths:
            return self.slab.shape.payload_bytes
        return self.lengths[slot] * PAGE_BYTES

    def set_stored_bytes(self, header: Header) -> None:
        """Locked. The record is there."""
        if self.lengths:
            self.lengths[header.record] = header.stored_bytes // PAGE_BYTES

    def adopt_stored_bytes(self, headers: memoryview, slots: npt.NDArray[np.uint32]) -> None:
        """Locked. Records of earlier runs are there.

        Args:
            headers: a valid header a slot, one after another.
        """
        if self.lengths:
            sizes = encoded_bytes(headers, len(slots))
            np.frombuffer(self.lengths, np.uint32)[slots] = -(-sizes.astype(np.int64) // PAGE_BYTES)

    def late(self, op: Op) -> Callable[[], None]:
        """For DiskRequest: the disk hangs."""
        return partial(self.health.note_hang, op.value)
