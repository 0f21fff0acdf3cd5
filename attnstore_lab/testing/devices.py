# SPDX-License-Identifier: Apache-2.0
"""Disks that misbehave when told to. Each is an io.device.Device; no real file is touched.

Faults, and why the store has to live with each:

- MemoryDevice: a request ends late and in any order. Meanwhile its chunk may be wanted by
  others, dropped, or reset, and no slot of it may be given away.
- PowerLossDevice: of what was not synced, each 4096-byte sector survives or not, on its own. So
  a record may be torn anywhere, and an old header may stand before new bytes.
- FailingDevice: a request fails; a bit of what is read is wrong; a write lands elsewhere, or
  nowhere, and is reported as done; the whole device dies. Each costs chunks, never an answer.
- SlowDevice (slow_device.py): completions come late, or never. No thread may wait for them
  without a deadline.

Not injected: a transfer that ends short. A Device moves every byte or reports an error.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from attnstore_lab.testing.slow_device import SlowDevice
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.checksum import check, checksum, seal
from attnstore_vllm.io.device import ALIGNMENT_BYTES, Completion, Device, IoRequest, Op

__all__ = ["Effect", "FailingDevice", "Fault", "MemoryDevice", "PowerLossDevice", "SlowDevice"]

SECTOR_BYTES = ALIGNMENT_BYTES
SETTLE_DEADLINE_S = 10.0


def _num_bytes(request: IoRequest) -> int:
    return sum(map(len, request.buffers))


class MemoryDevice:
    """Bytes in memory. A request is carried out as it is submitted, or, held, at step().

    `image` is the medium; a test may read and damage it while nothing is in flight.
    """

    def __init__(self, size_bytes: int, *, hold: bool = False) -> None:
        assert size_bytes % SECTOR_BYTES == 0
        self.image = bytearray(size_bytes)
        self.is_holding = hold
        self._pending: deque[IoRequest] = deque()
        self._ended: list[Completion] = []
        self._changed = threading.Condition(threading.RLock())
        self._woken = False
        self._is_waiting = False
        self._num_waits = 0  # polls that found nothing and began to wait
        self._refusal = ""

    @property
    def size_bytes(self) -> int:
        return len(self.image)

    @property
    def pending(self) -> tuple[IoRequest, ...]:
        """Requests that wait for step(), oldest first."""
        return tuple(self._pending)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        with self._changed:
            if self._refusal:
                raise DeviceError(f"memory: {self._refusal}")
            for request in requests:
                check(request, self.size_bytes)
                self._pending.append(request)
            if not self.is_holding:
                self._run_pending()

    def cancel(self, tags: Collection[int]) -> None:
        """Held requests end undone; all else has ended already."""
        with self._changed:
            for request in [held for held in self._pending if held.tag in tags]:
                self._pending.remove(request)
                self._end(request.tag, DeviceError("memory: cancelled before it was begun"))

    def step(self, at: int = 0) -> None:
        """Carry out one pending request, by default the oldest."""
        with self._changed:
            self._pending.rotate(-at)
            self._run(self._pending.popleft())
            self._pending.rotate(at)

    def hold(self) -> None:
        """From now on, carry out nothing before step()."""
        with self._changed:
            self.is_holding = True

    def release(self) -> None:
        """Carry out what is pending, and from now on each request as it is submitted."""
        with self._changed:
            self.is_holding = False
            self._run_pending()

    def poll(self, timeout_s: float) -> list[Completion]:
        with self._changed:
            if timeout_s > 0 and not self._has_news():
                self._is_waiting = True
                self._num_waits += 1
                self._changed.notify_all()
                self._changed.wait_for(self._has_news, timeout_s)
                self._is_waiting = False
            self._woken = False
            ended, self._ended = self._ended, []
            return ended

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when the thread that polls has done all it can, and waits for what is next.

        It is woken first and goes round once more, so that it has seen all that the caller did
        before. This is what makes a test with two threads repeatable.
        """
        with self._changed:
            rounds = self._num_waits
            self.wake()
            settled = self._changed.wait_for(
                lambda: self._num_waits > rounds and self._is_waiting and not self._has_news(),
                SETTLE_DEADLINE_S,
            )
            assert settled, "this device is not polled"

    def close(self, timeout_s: float) -> bool:
        """Held requests end here undone: a step() for them will not come."""
        with self._changed:
            self._refusal = "the device is closed"
            self._pending.clear()
            return True

    def _has_news(self) -> bool:
        return bool(self._ended) or self._woken

    def _run_pending(self) -> None:
        while self._pending:
            self._run(self._pending.popleft())

    def _run(self, request: IoRequest) -> None:
        if request.op is Op.SYNC:
            self._sync()
        digest = self._move(request)
        self._end(request.tag, digest=digest)

    def _move(self, request: IoRequest) -> bytes:
        """Carry it out; returns the checksum for the completion."""
        digest = seal(request)
        at = request.offset
        for buffer in request.buffers:
            if request.op is Op.READ:
                buffer[:] = self.image[at : at + len(buffer)]
            else:
                self._write(at, buffer)
            at += request.stride or len(buffer)
        return checksum(request.buffers[-1]) if request.checksum else digest

    def _end(self, tag: int, error: DeviceError | None = None, digest: bytes = b"") -> None:
        self._ended.append(Completion(tag, error, digest))
        self._changed.notify_all()

    def _write(self, offset: int, data: memoryview) -> None:
        self.image[offset : offset + len(data)] = data

    def _sync(self) -> None:
        pass  # memory is as durable as this object


class PowerLossDevice(MemoryDevice):
    """A disk that loses power. `image` is what reads see, `durable` what is sure to survive."""

    def __init__(self, size_bytes: int, rng: Random, *, hold: bool = False) -> None:
        super().__init__(size_bytes, hold=hold)
        self.durable = bytearray(size_bytes)
        self.rng = rng
        self._unsynced: set[int] = set()  # sector numbers

    def crash(self) -> PowerLossDevice:
        """Lose power; returns the disk as the next start finds it.

        A sector that was not synced, or whose write is in flight, survives by the roll of the
        die. This object answers everything from now on with an error.
        """
        with self._changed:
            self._refusal = "power was lost"
            for request in self._pending:
                if request.op is Op.WRITE:
                    self._move(request)
                self._end(request.tag, DeviceError(f"memory: {self._refusal}"))
            self._pending.clear()
            for sector in sorted(self._unsynced):
                if self.rng.random() < 0.5:
                    self._persist(sector)
            self._unsynced.clear()
            after = PowerLossDevice(self.size_bytes, self.rng, hold=self.is_holding)
            after.image[:] = after.durable[:] = self.durable
            return after

    def damage(self, offset: int) -> None:
        """Flip one bit of the byte at `offset`, for good."""
        with self._changed:
            self.image[offset] ^= 1
            self.durable[offset] ^= 1

    def _write(self, offset: int, data: memoryview) -> None:
        super()._write(offset, data)
        first, count = offset // SECTOR_BYTES, len(data) // SECTOR_BYTES
        self._unsynced.update(range(first, first + count))

    def _sync(self) -> None:
        for sector in self._unsynced:
            self._persist(sector)
        self._unsynced.clear()

    def _persist(self, sector: int) -> None:
        at = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
        self.durable[at] = self.image[at]


class Effect(Enum):
    """The fate of a request that a Fault names."""

    FAIL = "it fails with EIO"
    FLIP = "one bit of what it reads is wrong"
    MISPLACE = "what it writes lands at another offset, and it is reported as done"
    LOSE = "what it writes lands nowhere, and it is reported as done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Which requests are hit, and how. A condition that is None holds for every request."""

    effect: Effect
    op: Op | None = None
    nth: int | None = None
    """Only the n-th of those that the other conditions choose, counted from 0."""
    offsets: range | None = None
    """Only requests that touch a byte in this range."""
    bit: int = 0
    """FLIP: which bit of the bytes read; taken modulo their number."""
    shift_bytes: int = SECTOR_BYTES
    """MISPLACE: how far the write goes wrong."""

    def concerns(self, request: IoRequest) -> bool:
        if self.op is not None and request.op is not self.op:
            return False
        if self.offsets is None:
            return True
        at = request.offset
        for buffer in request.buffers:
            if at < self.offsets.stop and at + len(buffer) > self.offsets.start:
                return True
            at += request.stride or len(buffer)
        return False


class FailingDevice:
    """Wraps a device and injects faults. Of several faults that hit a request the first counts."""

    def __init__(self, inner: Device, *faults: Fault) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._faults = [(fault, [0]) for fault in faults]  # with the number of requests seen
        self._flips: dict[int, tuple[Fault, IoRequest]] = {}
        self._in_flight: set[int] = set()
        self._ended: list[Completion] = []
        self._dead = False

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def inject(self, fault: Fault) -> None:
        """Add a fault; its count starts now."""
        with self._lock:
            self._faults.append((fault, [0]))

    def die(self) -> None:
        """From now on submit() and poll() raise, and nothing in flight ends."""
        self._dead = True
        self._inner.wake()

    def submit(self, requests: Sequence[IoRequest]) -> None:
        self._check_alive()
        self._in_flight.update(request.tag for request in requests)
        forwarded = [kept for request in requests if (kept := self._apply(request)) is not None]
        self._inner.submit(forwarded)
        if len(forwarded) < len(requests):
            self._inner.wake()

    def cancel(self, tags: Collection[int]) -> None:
        self._inner.cancel(tags)  # that of a dead device stays in flight all the same

    def _apply(self, request: IoRequest) -> IoRequest | None:
        """The request to pass on; None if it has ended here."""
        with self._lock:
            fault = self._fault(request)
            if fault is None:
                return request
            if fault.effect is Effect.FLIP and request.op is Op.READ:
                self._flips[request.tag] = (fault, request)
                return request
            if fault.effect is Effect.MISPLACE and request.op is Op.WRITE:
                room = self.size_bytes - _num_bytes(request) + SECTOR_BYTES
                return replace(request, offset=(request.offset + fault.shift_bytes) % room)
            error = None
            if fault.effect is Effect.FAIL:
                error = DeviceError(
                    f"injected at byte {request.offset}: {request.op.value} failed: "
                    f"{os.strerror(errno.EIO)}"
                )
            elif fault.effect is not Effect.LOSE or request.op is not Op.WRITE:
                return request
            # What is lost was sealed: only the medium knows that it never came.
            digest = b"" if error is not None else seal(request)
            self._ended.append(Completion(request.tag, error, digest))
            return None

    def _fault(self, request: IoRequest) -> Fault | None:
        chosen = None
        for fault, seen in self._faults:
            if fault.concerns(request):
                if chosen is None and fault.nth in (None, seen[0]):
                    chosen = fault
                seen[0] += 1
        return chosen

    def poll(self, timeout_s: float) -> list[Completion]:
        self._check_alive()
        with self._lock:
            own, self._ended = self._ended, []
        ended = own + self._inner.poll(0 if own else timeout_s)
        self._check_alive()
        self._in_flight.difference_update(completion.tag for completion in ended)
        return [self._flipped(completion) for completion in ended]

    def _flipped(self, completion: Completion) -> Completion:
        with self._lock:
            flip = self._flips.pop(completion.tag, None)
        if flip is None or completion.error is not None:
            return completion
        fault, request = flip
        _flip_bit(request, fault.bit)
        if not request.checksum:
            return completion
        return replace(completion, checksum=checksum(request.buffers[-1]))

    def wake(self) -> None:
        self._inner.wake()

    def close(self, timeout_s: float) -> bool:
        """On a device that has died nothing in flight ever ends."""
        ended = self._inner.close(timeout_s)
        return ended and not (self._dead and self._in_flight)

    def _check_alive(self) -> None:
        if self._dead:
            raise DeviceError("the device has died")


def _flip_bit(request: IoRequest, bit: int) -> None:
    at = bit // 8 % _num_bytes(request)
    for buffer in request.buffers:
        if at < len(buffer):
            buffer[at] ^= 1 << bit % 8
            return
        at -= len(buffer)
