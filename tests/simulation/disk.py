# SPDX-License-Identifier: Apache-2.0
"""A disk in simulated time: slow, out of order, failing, torn by power losses. From a seed.

Every fault is one that the store must live with; `faults` counts what was really injected.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import CHECKSUM_BYTES, Completion, IoRequest, Op

SECTOR = 512


@dataclass(slots=True)
class Weather:
    """How bad the disk is. Probabilities are per request."""

    latency_s: float = 0.001
    error: float = 0.0
    flipped_bit: float = 0.0
    lost_write: float = 0.0
    misplaced_write: float = 0.0
    hang: float = 0.0
    """It ends after HANG_S only."""
    full: bool = False
    """Writes fail with ENOSPC."""


HANG_S = 20.0


class SimulatedDisk:
    """Implements io.device.Device. One thread; `now` is set by whoever drives it."""

    def __init__(self, image: bytearray, random: Random) -> None:
        self.image = image
        self.now = 0.0
        self.weather = Weather()
        self.faults: Counter[str] = Counter()
        self._random = random
        self._open: dict[int, tuple[float, IoRequest]] = {}
        self._unsynced: list[tuple[int, bytes]] = []
        """What a power loss may take back: (offset, bytes of before), oldest first."""

    @property
    def size_bytes(self) -> int:
        return len(self.image)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        for request in requests:
            assert request.tag not in self._open
            seconds = self._random.expovariate(1 / self.weather.latency_s)
            if self._random.random() < self.weather.hang:
                seconds += HANG_S
                self.faults["hang"] += 1
            self._open[request.tag] = (self.now + seconds, request)

    def cancel(self, tags: Collection[int]) -> None:
        """The medium is at work on all of them: nothing can be cancelled."""

    def wake(self) -> None:
        """Nobody waits."""

    def close(self, timeout_s: float) -> bool:
        return not self._open

    def poll(self, timeout_s: float) -> list[Completion]:
        """What has ended by now."""
        ended = sorted((at, tag) for tag, (at, _) in self._open.items() if at <= self.now)
        completions = []
        for _, tag in ended:
            _, request = self._open.pop(tag)
            completions.append(self._carry_out(request))
        return completions

    @property
    def next_end(self) -> float | None:
        return min((at for at, _ in self._open.values()), default=None)

    def lose_power(self) -> bytearray:
        """The medium as the next start finds it. This disk is not used again.

        Of each unsynced or unfinished write, every sector is new or old, on its own.
        """
        for _, request in self._open.values():
            if request.op is Op.WRITE:
                self._write(request.offset, b"".join(self._sealed(request)))
        for offset, before in reversed(self._unsynced):
            for at in range(0, len(before), SECTOR):
                if self._random.random() < 0.5:
                    self.image[offset + at : offset + at + SECTOR] = before[at : at + SECTOR]
        self.faults["power loss"] += 1
        return self.image

    def kill(self) -> bytearray:
        """The process is killed: the kernel finishes what it was given, or never got it."""
        for _, request in self._open.values():
            if request.op is Op.WRITE and self._random.random() < 0.5:
                self._write(request.offset, b"".join(self._sealed(request)))
        return self.image

    # ---- one request -------------------------------------------------------------------

    def _happens(self, name: str, probability: float) -> bool:
        if self._random.random() >= probability:
            return False
        self.faults[name] += 1
        return True

    def _carry_out(self, request: IoRequest) -> Completion:
        weather = self.weather
        if self._happens("error", weather.error):
            return self._failed(request, errno.EIO)
        if request.op is Op.SYNC:
            self._unsynced.clear()
            return Completion(request.tag, None)
        if request.op is Op.READ:
            return Completion(request.tag, None, self._read(request))
        if weather.full:
            self.faults["full"] += 1
            return self._failed(request, errno.ENOSPC)
        sealed = self._sealed(request)
        digest = b""
        if request.seals:
            digest = xxhash.xxh3_128_digest(bytes(request.buffers[request.seals[0].of]))
        if not self._happens("lost write", weather.lost_write):
            offset = request.offset
            if self._happens("misplaced write", weather.misplaced_write):
                size = sum(map(len, sealed))
                offset = self._random.randrange(0, (self.size_bytes - size) // 4096) * 4096
            self._write(offset, b"".join(sealed))
        return Completion(request.tag, None, digest)

    def _failed(self, request: IoRequest, code: int) -> Completion:
        return Completion(request.tag, DeviceError(f"simulated: {os.strerror(code)}"))

    def _sealed(self, request: IoRequest) -> list[bytes]:
        """The buffers with their seals put in; the caller's own stay as they are."""
        buffers = [bytearray(buffer) for buffer in request.buffers]
        for seal in request.seals:
            digest = xxhash.xxh3_128_digest(bytes(buffers[seal.of]))
            buffers[0][seal.at : seal.at + CHECKSUM_BYTES] = digest
        return [bytes(buffer) for buffer in buffers]

    def _write(self, offset: int, data: bytes) -> None:
        self._unsynced.append((offset, bytes(self.image[offset : offset + len(data)])))
        self.image[offset : offset + len(data)] = data

    def _read(self, request: IoRequest) -> bytes:
        offset = request.offset
        for i, buffer in enumerate(request.buffers):
            at = request.offset + i * request.stride if request.stride else offset
            buffer[:] = self.image[at : at + len(buffer)]
            offset += len(buffer)
        if self._happens("flipped bit", self.weather.flipped_bit):
            buffer = self._random.choice(request.buffers)
            buffer[self._random.randrange(len(buffer))] ^= 1 << self._random.randrange(8)
        return xxhash.xxh3_128_digest(bytes(request.buffers[-1])) if request.checksum else b""
