# SPDX-License-Identifier: Apache-2.0
"""A file as a Device, through aiofiles: works on any file system.

One thread runs an event loop; `depth` workers on it each own one open file and move one request
at a time, on threads that hold no GIL while bytes move. The page cache is bypassed where the
file system allows it (O_DIRECT), so that KV is not kept in memory twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from mmap import mmap
from pathlib import Path

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.checksum import check, checksum, seal
from attnstore_vllm.io.daemon_pool import DaemonPool
from attnstore_vllm.io.device import ALIGNMENT_BYTES, Completion, IoRequest, Op
from attnstore_vllm.own_files import NotOursError, open_own

_left_behind: list[object] = []
"""Requests that a disk did not give back: their buffers stay as long as the process."""


def direct_flag(path: Path) -> int:
    """O_DIRECT if the file system takes it for `path`, else 0."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        fd = open_own(path, os.O_RDONLY | flag)
    except NotOursError:
        raise
    except OSError:
        return 0
    try:
        os.preadv(fd, [mmap(-1, ALIGNMENT_BYTES)], 0)
        return flag
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        os.close(fd)


def _transfer(fd: int, request: IoRequest) -> None:
    """Move all bytes of a READ or WRITE. A write goes to the kernel whole (docs/format.md).

    Raises: OSError.
    """
    move = os.preadv if request.op is Op.READ else os.pwritev
    if request.stride:
        for i, buffer in enumerate(request.buffers):
            _move_all(move, fd, [buffer], request.offset + i * request.stride)
    else:
        _move_all(move, fd, list(request.buffers), request.offset)


def _move_all(
    move: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: list[memoryview],
    offset: int,
) -> None:
    total, moved = sum(map(len, buffers)), 0
    while moved < total:  # a short transfer is resumed, never taken for whole
        count = move(fd, buffers, offset + moved)
        if not count:
            raise OSError(errno.EIO, f"{moved} of {total} bytes, then nothing")
        moved += count
        while count and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


class AiofilesDevice:
    """Implements io.device.Device over an existing file. Its size is fixed at the start.

    Raises: DeviceError if the file cannot be opened.
    """

    def __init__(self, path: Path, depth: int) -> None:
        assert depth > 0
        self.path = path
        try:
            self._size_bytes = path.stat().st_size
            self._flags = direct_flag(path)
        except OSError as error:
            raise DeviceError(f"{path}: {error}") from error
        self._completions: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._executor = DaemonPool(depth, "attnstore-io")
        self._loop: asyncio.AbstractEventLoop
        self._tags: asyncio.Queue[int | None]
        self._waiting: dict[int, IoRequest] = {}  # by tag, until a worker takes it
        self._moving: dict[int, IoRequest] = {}
        self._closed = False
        started: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(depth, started), name="attnstore-aio", daemon=True
        )
        self._thread.start()
        if (failure := started.get()) is not None:
            self._thread.join()
            raise DeviceError(f"{path}: {failure}") from failure

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return bool(self._flags & getattr(os, "O_DIRECT", 0))

    def submit(self, requests: Sequence[IoRequest]) -> None:
        if self._closed:
            raise DeviceError(f"{self.path}: the device is closed")
        for request in requests:
            check(request, self._size_bytes)
        try:
            self._loop.call_soon_threadsafe(self._queue, tuple(requests))
        except RuntimeError as error:  # the loop has ended without close()
            raise DeviceError(f"{self.path}: {error}") from error

    def cancel(self, tags: Collection[int]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has everything on it
            self._loop.call_soon_threadsafe(self._cancel, tuple(tags))

    def poll(self, timeout_s: float) -> list[Completion]:
        if not (self._thread.is_alive() or self._closed):
            raise DeviceError(f"{self.path}: the thread that serves it has ended")
        found: list[Completion] = []
        try:
            first = self._completions.get(timeout=timeout_s) if timeout_s > 0 else None
            if first is not None:
                found.append(first)
            while True:
                more = self._completions.get_nowait()
                if more is not None:
                    found.append(more)
        except queue.Empty:
            return found

    def wake(self) -> None:
        self._completions.put(None)

    def close(self, timeout_s: float) -> bool:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tags.put_nowait, None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        # What hangs is left to its threads; what waits behind it must not be written years later.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, None)
        _left_behind.append(self._moving)
        return False

    # ---- on the loop's thread ----------------------------------------------------------

    def _queue(self, requests: tuple[IoRequest, ...]) -> None:
        for request in requests:
            self._waiting[request.tag] = request
            self._tags.put_nowait(request.tag)

    def _cancel(self, tags: tuple[int, ...] | None) -> None:
        """End those of these requests, or of all, that no worker has taken."""
        for tag in tuple(self._waiting) if tags is None else tags:
            request = self._waiting.pop(tag, None)
            if request is not None:
                self._end(request, OSError(errno.ECANCELED, "cancelled before it was begun"))

    def _end(self, request: IoRequest, failure: OSError | None, digest: bytes = b"") -> None:
        error = None
        if failure is not None:
            where = f"{self.path} at byte {request.offset}"
            text = f"{where}: {request.op.value} failed: {failure}"
            error = DeviceError(text, failure.errno or 0)
        self._completions.put(Completion(request.tag, error, digest))

    def _run(self, depth: int, started: queue.SimpleQueue[OSError | None]) -> None:
        # Made here, not by the caller: Ctrl-C comes to the main thread alone, and a loop that it
        # leaves half made prints a traceback when it is deleted.
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            self._executor.shutdown()
            started.put(error)
            return
        self._tags = asyncio.Queue()
        try:
            self._loop.run_until_complete(self._serve(depth, started))
        finally:
            self._executor.shutdown()
            self._loop.close()

    async def _serve(self, depth: int, started: queue.SimpleQueue[OSError | None]) -> None:
        files: list[AsyncFileIO] = []
        try:
            for _ in range(depth):
                files.append(await self._open())
        except OSError as error:
            started.put(error)
        else:
            started.put(None)
            await asyncio.gather(*(self._work(file) for file in files))
        for file in files:
            # At the interpreter's exit the executor ends first; the process's end closes then.
            with contextlib.suppress(RuntimeError):
                await file.close()

    async def _open(self) -> AsyncFileIO:
        def opener(path: str, flags: int) -> int:
            return open_own(Path(path), flags | self._flags)

        file = await aiofiles.open(
            self.path, "r+b", buffering=0, opener=opener, executor=self._executor
        )
        assert isinstance(file, AsyncFileIO)
        return file

    async def _work(self, file: AsyncFileIO) -> None:
        while (tag := await self._tags.get()) is not None:
            request = self._waiting.pop(tag, None)
            if request is None:
                continue  # it was cancelled
            self._moving[tag] = request
            digest, failure = b"", None
            try:
                digest = await self._move(file, request)
            except OSError as error:
                failure = error
            del self._moving[tag]
            self._end(request, failure, digest)
        self._tags.put_nowait(None)  # the next worker stops as well

    async def _move(self, file: AsyncFileIO, request: IoRequest) -> bytes:
        """Move all bytes; returns the checksum for the completion."""
        digest = b""
        if request.op is Op.SYNC:
            await self._loop.run_in_executor(self._executor, os.fdatasync, file.fileno())
            return digest
        if request.seals:
            digest = await self._loop.run_in_executor(self._executor, seal, request)
        await self._loop.run_in_executor(self._executor, _transfer, file.fileno(), request)
        if request.checksum:
            last = request.buffers[-1]
            digest = await self._loop.run_in_executor(self._executor, checksum, last)
        return digest
