# SPDX-License-Identifier: Apache-2.0
"""Requests on their way: who is told when one ends, and what happens when one does not.

A request that has no completion by its deadline is *late*: its owner is told once and gives
up on it, the device is asked to cancel it, and its buffers stay taken until the completion
comes after all, for the device may still write to them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import Completion, Device, IoRequest, Op, Seal


@dataclass(slots=True)
class Transfer:
    """One request to come. `done` is called once, `late` at most once and before it.

    Both are called without the store's lock, `late` on the keeper's thread.
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


class Flights:
    """The keeper's requests on one device.

    Args:
        deadline_s: how long a request may take before it is late.
    """

    def __init__(self, device: Device, deadline_s: float, clock: Callable[[], float]) -> None:
        self._device = device
        self._deadline_s = deadline_s
        self._clock = clock
        self._tags = itertools.count(1)
        self._open: dict[int, Transfer] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Hand requests to the device. From any thread; waits for nothing."""
        if not transfers:
            return
        deadline = self._clock() + self._deadline_s
        requests: list[IoRequest] = []
        with self._lock:
            for transfer in transfers:
                transfer.deadline = deadline
                tag = next(self._tags)
                self._open[tag] = transfer
                requests.append(
                    IoRequest(
                        tag, transfer.op, transfer.offset, transfer.buffers, transfer.seals,
                        transfer.checksum, transfer.stride,
                    )
                )  # fmt: skip
        try:
            self._device.submit(requests)
        except DeviceError as error:
            for request in requests:
                self._end(Completion(request.tag, error))

    def run(self, timeout_s: float) -> None:
        """Wait for completions, `timeout_s` at most, and tell the owners of what has ended."""
        for completion in self._device.poll(timeout_s):
            self._end(completion)
        self._check_deadlines()

    def cancel_all(self) -> None:
        with self._lock:
            tags = list(self._open)
        self._device.cancel(tags)

    def _end(self, completion: Completion) -> None:
        with self._lock:
            transfer = self._open.pop(completion.tag)
        transfer.done(completion)

    def _check_deadlines(self) -> None:
        now = self._clock()
        with self._lock:
            late = {
                tag: transfer
                for tag, transfer in self._open.items()
                if transfer.deadline < now and not transfer.is_late
            }
            for transfer in late.values():
                transfer.is_late = True
        if late:
            self._device.cancel(list(late))
            for transfer in late.values():
                transfer.late()
