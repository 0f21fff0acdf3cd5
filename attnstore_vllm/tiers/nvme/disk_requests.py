# SPDX-License-Identifier: Apache-2.0
"""Requests on their way: who is told when one ends, and what happens when one does not.

A request that has no completion by its deadline is *late*: its owner is told once and gives
up on it, the device is asked to cancel it, and its buffers stay taken until the completion
comes after all, for the device may still write to them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import Completion, Device, IoRequest, Op, Seal
from attnstore_vllm.types import Clock

TIMES_KEPT = 1024
"""Seconds of so many requests are kept, of each kind, until they are taken."""


@dataclass(slots=True)
class DiskRequest:
    """One request to come. `done` is called once, `late` at most once and before it.

    Both are called without the store's lock, `late` on the store's thread.
    """

    op: Op
    done: Callable[[Completion], None]
    late: Callable[[], None]
    offset: int = 0
    buffers: tuple[memoryview, ...] = ()
    seals: tuple[Seal, ...] = ()
    checksum: bool = False
    stride: int = 0
    deadline: float = field(init=False, default=0.0)
    is_late: bool = field(init=False, default=False)


class DiskRequests:
    """Our requests on one device.

    Args:
        deadline_s: how long a request may take before it is late.
    """

    def __init__(self, device: Device, deadline_s: float, clock: Clock) -> None:
        self._device = device
        self._deadline_s = deadline_s
        self._clock = clock
        self._tags = itertools.count(1)
        self._open: dict[int, DiskRequest] = {}
        self._lock = threading.Lock()
        self.seconds = {op: deque[float](maxlen=TIMES_KEPT) for op in (Op.READ, Op.WRITE)}
        """Times of reads and writes of a header with its payload, from submit() on."""

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, wanted: Sequence[DiskRequest]) -> None:
        """Hand requests to the device. From any thread; waits for nothing."""
        if not wanted:
            return
        deadline = self._clock() + self._deadline_s
        sent: list[IoRequest] = []
        with self._lock:
            for request in wanted:
                request.deadline = deadline
                tag = next(self._tags)
                self._open[tag] = request
                sent.append(
                    IoRequest(
                        tag,
                        request.op,
                        request.offset,
                        request.buffers,
                        request.seals,
                        request.checksum,
                        request.stride,
                    )
                )
        try:
            self._device.submit(sent)
        except DeviceError as error:
            for unsent in sent:
                self._end(Completion(unsent.tag, error))

    def run(self, timeout_s: float) -> bool:
        """Wait for completions, `timeout_s` at most, and tell the owners of what has ended.

        Returns whether something has.
        """
        completions = self._device.poll(timeout_s)
        for completion in completions:
            self._end(completion)
        self._check_deadlines()
        return bool(completions)

    def cancel_all(self) -> None:
        with self._lock:
            tags = list(self._open)
        self._device.cancel(tags)

    def _end(self, completion: Completion) -> None:
        with self._lock:
            request = self._open.pop(completion.tag)
        if len(request.buffers) > 1 and not request.stride and request.op in self.seconds:
            began = request.deadline - self._deadline_s
            self.seconds[request.op].append(self._clock() - began)
        request.done(completion)

    def _check_deadlines(self) -> None:
        now = self._clock()
        with self._lock:
            late = {
                tag: request
                for tag, request in self._open.items()
                if request.deadline < now and not request.is_late
            }
            for request in late.values():
                request.is_late = True
        if late:
            self._device.cancel(list(late))
            for request in late.values():
                request.late()
