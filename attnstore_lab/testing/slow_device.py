# SPDX-License-Identifier: Apache-2.0
"""A disk whose answers come late, or never, or as fast as a slower disk's."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Collection, Sequence

from attnstore_vllm.io.device import Completion, Device, IoRequest, Op


class SlowDevice:
    """Wraps a device whose completions come `delay_s` late, when released, or never.

    Args:
        bytes_per_s: what it reads in a second, and writes beside that: one request after another.
    """

    def __init__(
        self, inner: Device, delay_s: float = 0.0, bytes_per_s: float = float("inf")
    ) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._byte_s = 1 / bytes_per_s
        self._free_at = dict.fromkeys(Op, 0.0)
        self._due: dict[int, float] = {}
        """By tag: when it ends at the earliest."""
        self._late: list[tuple[float, int, Completion]] = []  # a heap: when it may be told, what
        self._woken = threading.Event()
        self._hanging = False
        self._released = threading.Event()
        self._in_flight: set[int] = set()

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def hang(self) -> None:
        """Tell of no completion from now on, until release()."""
        self._released.clear()
        self._hanging = True

    def release(self) -> None:
        self._hanging = False
        self._released.set()
        self.wake()

    def submit(self, requests: Sequence[IoRequest]) -> None:
        now = time.monotonic()
        for request in requests:
            seconds = sum(map(len, request.buffers)) * self._byte_s
            due = max(now, self._free_at[request.op]) + seconds
            self._free_at[request.op] = self._due[request.tag] = due
        self._in_flight.update(request.tag for request in requests)
        self._inner.submit(requests)

    def cancel(self, tags: Collection[int]) -> None:
        """A request that hangs says nothing of this either."""
        self._inner.cancel(tags)

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while True:
            until = deadline
            if self._late and not self._hanging:
                until = min(until, self._late[0][0])
            for completion in self._inner.poll(max(0.0, until - time.monotonic())):
                ends = max(time.monotonic(), self._due.pop(completion.tag)) + self._delay_s
                heapq.heappush(self._late, (ends, completion.tag, completion))
            due: list[Completion] = []
            while not self._hanging and self._late and self._late[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._late)[2])
            self._in_flight.difference_update(completion.tag for completion in due)
            if due or self._woken.is_set() or time.monotonic() >= deadline:
                self._woken.clear()
                return due

    def wake(self) -> None:
        self._woken.set()
        self._inner.wake()

    def close(self, timeout_s: float) -> bool:
        """A request that is only late has ended on the medium; what hangs is waited for, and
        left."""
        if self._hanging and self._in_flight:
            self._released.wait(timeout_s)
        hangs = self._hanging and bool(self._in_flight)
        return self._inner.close(timeout_s) and not hangs
