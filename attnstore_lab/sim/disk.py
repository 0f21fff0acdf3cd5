# SPDX-License-Identifier: Apache-2.0
"""A disk in virtual time: so many bytes a second each way, one request after the other.

It keeps the headers that are written, and no payloads: all payloads have the same checksum.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

from attnstore_lab.sim.hardware import Machine
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.device import CHECKSUM_BYTES, Completion, IoRequest, Op

_PAYLOAD_CHECKSUM = bytes(range(1, CHECKSUM_BYTES + 1))


class SimulatedDisk:
    """Implements io.device.Device. `size_bytes` is no limit here: the slab has one."""

    def __init__(self, machine: Machine, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latency_s = machine.nvme_latency_s
        self._record_s = {
            Op.READ: machine.nvme_chunk_bytes / machine.nvme_read,
            Op.WRITE: machine.nvme_chunk_bytes / machine.nvme_write,
        }
        self._free_at = {Op.READ: 0.0, Op.WRITE: 0.0}
        self._pages: dict[int, bytes] = {}
        self._open: list[tuple[float, int, IoRequest]] = []
        self._num_ended = 0
        self.num_moved = {Op.READ: 0, Op.WRITE: 0}
        self.size_bytes = 1 << 62

    @property
    def next_end(self) -> float:
        """When the next request ends; infinite if none is in flight."""
        return self._open[0][0] if self._open else float("inf")

    def take_ended(self) -> int:
        """How many requests have ended since this was asked before."""
        count, self._num_ended = self._num_ended, 0
        return count

    def submit(self, requests: Sequence[IoRequest]) -> None:
        now = self._clock()
        for request in requests:
            if len(request.buffers) < 2:  # a segment's header, a probe
                heapq.heappush(self._open, (now + self._latency_s, request.tag, request))
                continue
            start = max(now, self._free_at[request.op])
            end = self._free_at[request.op] = start + self._record_s[request.op]
            heapq.heappush(self._open, (end + self._latency_s, request.tag, request))

    def cancel(self, tags: Collection[int]) -> None:
        """Nothing can be cancelled."""

    def wake(self) -> None:
        """Nothing waits."""

    def close(self, timeout_s: float) -> bool:
        return True

    def poll(self, timeout_s: float) -> list[Completion]:
        """Requests that have ended by now."""
        ended = []
        now = self._clock()
        while self._open and self._open[0][0] <= now:
            _, _, request = heapq.heappop(self._open)
            ended.append(self._carry_out(request))
        self._num_ended += len(ended)
        return ended

    def _carry_out(self, request: IoRequest) -> Completion:
        if len(request.buffers) == 2:
            self.num_moved[request.op] += 1
        if request.op is Op.READ:
            header = self._pages[request.offset]
            request.buffers[0][: len(header)] = header
            request.buffers[0][len(header) :] = bytes(len(request.buffers[0]) - len(header))
            return Completion(request.tag, None, _PAYLOAD_CHECKSUM if request.checksum else b"")
        page = bytearray(request.buffers[0])
        for seal in request.seals:
            digest = checksum(page) if seal.of == 0 else _PAYLOAD_CHECKSUM
            page[seal.at : seal.at + CHECKSUM_BYTES] = digest
        self._pages[request.offset] = bytes(page).rstrip(b"\0")
        return Completion(request.tag, None, _PAYLOAD_CHECKSUM if request.seals else b"")
