# SPDX-License-Identifier: Apache-2.0
"""A file as a Device, through io_uring and O_DIRECT: Linux, and a file system that takes both.

The work is done by csrc/io/uring_device.h on threads of its own; this keeps the buffers alive and
gives errors their place and their words.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import attnstore_vllm._native as native
from attnstore_vllm.errors import AttnStoreError, DeviceError
from attnstore_vllm.io.aiofiles_device import direct_flag
from attnstore_vllm.io.checksum import check
from attnstore_vllm.io.device import Completion, IoRequest, Op
from attnstore_vllm.own_files import open_own

PIECE_BYTES = 1 << 20
"""Larger reads go to the disk in pieces of this size, several at a time. A write goes whole, so
that a killed process leaves all of it or nothing."""
HASH_THREADS = 2

_OPS = {Op.READ: 0, Op.WRITE: 1, Op.SYNC: 2}

_left_behind: list[object] = []
"""Requests that the kernel did not give back: their buffers stay as long as the process."""


class UringUnavailableError(AttnStoreError):
    """This file cannot be served through io_uring here; the text says why."""


class UringDevice:
    """Implements io.device.Device over an existing file. Its size is fixed at the start.

    Args:
        depth: transfers that the disk has at a time; requests beyond that wait here.
        regions: (address, bytes) of memory where buffers lie. It is pinned once, where the limit
            on locked memory allows, and outlives the device.

    Raises: DeviceError if the file cannot be opened; UringUnavailableError.
    """

    def __init__(self, path: Path, depth: int, *, regions: Sequence[tuple[int, int]] = ()) -> None:
        assert depth > 0
        self.path = path
        self._in_flight: dict[int, IoRequest] = {}
        self._closed = False
        if not native.has_uring:
            raise UringUnavailableError("the native extension was built without liburing")
        try:
            self._size_bytes = path.stat().st_size
            flag = direct_flag(path)
            if not flag:
                raise UringUnavailableError(f"{path}: the file system refuses O_DIRECT")
            fd = open_own(path, os.O_RDWR | flag)
        except OSError as error:
            raise DeviceError(f"{path}: {error}") from error
        try:
            self._native = native.Uring(
                fd=fd,
                depth=depth,
                regions=list(regions),
                piece_bytes=PIECE_BYTES,
                num_hash_threads=HASH_THREADS,
            )
        except OSError as error:
            raise UringUnavailableError(f"the kernel refuses io_uring: {error}") from error

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def has_regions(self) -> bool:
        """Whether the regions are pinned once, rather than for each transfer."""
        return self._native.has_regions

    def submit(self, requests: Sequence[IoRequest]) -> None:
        items = []
        for request in requests:
            check(request, self._size_bytes)
            assert request.tag not in self._in_flight, f"tag {request.tag} is in flight"
            items.append(
                (
                    request.tag,
                    _OPS[request.op],
                    request.offset,
                    request.buffers,
                    request.seals,
                    request.checksum,
                    request.stride,
                )
            )
        mine = {request.tag: request for request in requests}
        assert len(mine) == len(requests), "two requests have one tag"
        self._in_flight.update(mine)
        taken = False
        try:
            taken = self._native.submit(items)
        finally:
            if not taken:
                for tag in mine:
                    self._in_flight.pop(tag, None)  # close() may have forgotten it
        if not taken:
            raise DeviceError(f"{self.path}: the device is closed")

    def cancel(self, tags: Collection[int]) -> None:
        self._native.cancel(list(tags))

    def poll(self, timeout_s: float) -> list[Completion]:
        ended = self._native.poll(timeout_s)
        if not ended and (failure := self._native.failure()):
            raise DeviceError(f"{self.path}: the thread that serves it has ended: {failure}")
        in_flight = self._in_flight
        found = [(in_flight.pop(one[0], None), one) for one in ended]
        return [self._completion(request, *one) for request, one in found if request is not None]

    def _completion(
        self, request: IoRequest, tag: int, code: int, text: str, checksum: bytes
    ) -> Completion:
        if not code:
            return Completion(tag, None, checksum)
        failure = OSError(code, text)
        return Completion(
            tag,
            DeviceError(
                f"{self.path} at byte {request.offset}: {request.op.value} failed: {failure}", code
            ),
        )

    def wake(self) -> None:
        self._native.wake()

    def close(self, timeout_s: float) -> bool:
        ended = self._native.close(timeout_s)
        if ended:
            self._in_flight = {}  # what still ends is lost, and poll() knows none of it
        elif not self._closed:
            _left_behind.append(self._in_flight)
        self._closed = True
        return ended

    def __del__(self) -> None:
        # The buffers must not go while the kernel still writes to them.
        if hasattr(self, "_native") and not self._closed:
            self.close(0.0)
