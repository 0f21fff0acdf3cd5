# SPDX-License-Identifier: Apache-2.0
"""How fast this machine's memory and disk are, in a few seconds: for `attnstore doctor`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import numpy as np

from attnstore_vllm.config.settings import NvmeConfig
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.io.device import Device, IoRequest, Op

MIB = 1 << 20
RECORD_BYTES = MIB
FILE_BYTES = 256 * MIB
_LEAST_S = 1.0
"""Less than this is measured again: a disk's first requests say little."""
_WAIT_S = 30.0
_COPIES = 5


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second of records of 1 MiB, as many in flight as the store has."""

    by: str
    """How the disk was asked, in words."""
    write: float
    read: float


def memory_speed() -> float:
    """Bytes a second of one thread's copy, the fastest of a few. Takes 512 MiB for a moment."""
    source = np.ones(256 * MIB, np.uint8)
    target = np.zeros_like(source)
    best = 0.0
    for _ in range(_COPIES):
        started = time.perf_counter()
        np.copyto(target, source)
        best = max(best, len(source) / (time.perf_counter() - started))
    return best


def disk_speed(directory: Path, nvme: NvmeConfig, depth: int) -> DiskSpeed:
    """Write and read a file of 256 MiB that is gone afterwards.

    Args:
        directory: that exists, on the disk to be measured.
    Raises: DeviceError, ConfigError (io: uring, and it cannot be had), OSError.
    """
    fd, name = tempfile.mkstemp(prefix=".attnstore-doctor-", dir=directory)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        os.close(fd)
        device, by = open_device(Path(name), depth, nvme.io)
        try:
            offsets = range(0, FILE_BYTES, RECORD_BYTES)
            _run(device, Op.WRITE, offsets, depth)  # reserved blocks are slower the first time
            write = _speed(device, Op.WRITE, offsets, depth)
            read = _speed(device, Op.READ, offsets, depth)
        finally:
            device.close(_WAIT_S)
        return DiskSpeed(by, write, read)
    finally:
        Path(name).unlink(missing_ok=True)


def _speed(device: Device, op: Op, offsets: Sequence[int], depth: int) -> float:
    started, moved = time.perf_counter(), 0
    while True:
        _run(device, op, offsets, depth)
        moved += FILE_BYTES
        took = time.perf_counter() - started
        if took >= _LEAST_S:
            return moved / took


def _run(device: Device, op: Op, offsets: Sequence[int], depth: int) -> None:
    """Every record once, `depth` in flight; a sync behind writes. Raises: DeviceError."""
    memory = memoryview(mmap(-1, depth * RECORD_BYTES))
    free, waiting = list(range(depth)), list(reversed(offsets))
    while waiting or len(free) < depth:
        batch = []
        while waiting and free:
            place = free.pop()
            buffer = memory[place * RECORD_BYTES :][:RECORD_BYTES]
            batch.append(IoRequest(place, op, waiting.pop(), (buffer,)))
        if batch:
            device.submit(batch)
        free += _ended(device)
    if op is Op.WRITE:
        device.submit([IoRequest(depth, Op.SYNC)])
        _ended(device)


def _ended(device: Device) -> list[int]:
    """Tags of the requests that have ended; waits for one. Raises: DeviceError."""
    ended = device.poll(_WAIT_S)
    if not ended:
        raise DeviceError(f"the disk has not answered for {_WAIT_S:.0f} s")
    for completion in ended:
        if completion.error is not None:
            raise completion.error
    return [completion.tag for completion in ended]
