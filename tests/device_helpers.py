# SPDX-License-Identifier: Apache-2.0
"""Every kind of Device over a place of SIZE zero bytes, and requests to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from mmap import mmap
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

import attnstore_vllm._native as native
from attnstore_lab.testing.devices import (
    SECTOR_BYTES,
    FailingDevice,
    MemoryDevice,
    PowerLossDevice,
    SlowDevice,
)
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.aiofiles_device import AiofilesDevice
from attnstore_vllm.io.device import Completion, Device, IoRequest, Op, Seal
from attnstore_vllm.io.uring_device import UringDevice, UringUnavailableError

SIZE = 16 * SECTOR_BYTES
DEADLINE_S = 30.0

KINDS: dict[str, Callable[[Path], Device]] = {
    "memory": lambda path: MemoryDevice(path.stat().st_size),
    "power loss": lambda path: PowerLossDevice(path.stat().st_size, Random(1)),
    "failing": lambda path: FailingDevice(MemoryDevice(path.stat().st_size)),
    "slow": lambda path: SlowDevice(MemoryDevice(path.stat().st_size), delay_s=0.001),
    "aiofiles": lambda path: AiofilesDevice(path, depth=3),
    "uring": lambda path: UringDevice(path, depth=3),
}


@cache
def why_no_uring() -> str:
    """Why this machine's io_uring cannot be tested; empty if it can."""
    if not native.has_uring:
        return "built without io_uring"
    with TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.write_bytes(bytes(SIZE))
        try:
            UringDevice(path, 1).close(DEADLINE_S)
        except UringUnavailableError as error:
            return str(error)
    return ""


needs_uring = pytest.mark.skipif(bool(why_no_uring()), reason=why_no_uring())


def buffer(num_sectors: int = 1, fill: int = 0) -> memoryview:
    """Aligned, as O_DIRECT wants it."""
    pages = mmap(-1, num_sectors * SECTOR_BYTES)
    pages[:] = bytes([fill]) * len(pages)
    return memoryview(pages)


def write(tag: int, sector: int, *buffers: memoryview, seals: tuple[Seal, ...] = ()) -> IoRequest:
    return IoRequest(tag, Op.WRITE, sector * SECTOR_BYTES, buffers, seals)


def read(
    tag: int, sector: int, *buffers: memoryview, checksum: bool = False, stride: int = 0
) -> IoRequest:
    """`stride` in sectors."""
    return IoRequest(
        tag,
        Op.READ,
        sector * SECTOR_BYTES,
        buffers,
        checksum=checksum,
        stride=stride * SECTOR_BYTES,
    )


def wait_for(device: Device, count: int) -> list[Completion]:
    """The next `count` completions; fails if there are others, or none in time."""
    ended: list[Completion] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < count:
        assert time.monotonic() < deadline, f"{len(ended)} of {count} requests have ended"
        ended += device.poll(0.1)
    assert len(ended) == count
    return ended


def finish_all(device: Device, *requests: IoRequest) -> dict[int, Completion]:
    """Submit, and wait for all of them."""
    device.submit(requests)
    ended = wait_for(device, len(requests))
    assert sorted(c.tag for c in ended) == sorted(r.tag for r in requests)
    return {completion.tag: completion for completion in ended}


def finish(device: Device, *requests: IoRequest) -> dict[int, DeviceError | None]:
    return {tag: ended.error for tag, ended in finish_all(device, *requests).items()}


def contents(device: Device, sector: int, num_sectors: int = 1) -> bytes:
    into = buffer(num_sectors)
    assert finish(device, read(999, sector, into)) == {999: None}
    return bytes(into)
