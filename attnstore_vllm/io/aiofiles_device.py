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
import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import ALIGNMENT_BYTES, Completion, IoRequest, Op

logger = logging.getLogger(__name__)


def direct_flag(path: Path) -> int:
    """O_DIRECT if the file system takes it for `path`, else 0."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flag)
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


class AiofilesDevice:
    """Implements io.device.Device over an existing file. Its size is fixed at the start.

    Raises: DeviceError if the file cannot be opened.
    """

    def __init__(self, path: Path, depth: int) -> None:
        assert depth > 0
        self.path = path
        try:
            self._size_bytes = path.stat().st_size
            self._flags = os.O_NOFOLLOW | os.O_CLOEXEC | direct_flag(path)
        except OSError as error:
            raise DeviceError(f"{path}: {error}") from error
        self._completions: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(depth, thread_name_prefix="attnstore-io")
        self._loop = asyncio.new_event_loop()
        self._requests: asyncio.Queue[IoRequest | None] = asyncio.Queue()
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
            assert request.offset % ALIGNMENT_BYTES == 0
            assert all(len(buffer) % ALIGNMENT_BYTES == 0 for buffer in request.buffers)
            assert request.offset + sum(map(len, request.buffers)) <= self._size_bytes
        try:
            self._loop.call_soon_threadsafe(self._queue, tuple(requests))
        except RuntimeError as error:  # the loop has ended without close()
            raise DeviceError(f"{self.path}: {error}") from error

    def _queue(self, requests: tuple[IoRequest, ...]) -> None:
        for request in requests:
            self._requests.put_nowait(request)

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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._requests.put_nowait, None)
        self._thread.join()

    # ---- on the loop's thread ----------------------------------------------------------

    def _run(self, depth: int, started: queue.SimpleQueue[OSError | None]) -> None:
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
            return os.open(path, flags | self._flags)

        file = await aiofiles.open(
            self.path, "r+b", buffering=0, opener=opener, executor=self._executor
        )
        assert isinstance(file, AsyncFileIO)
        return file

    async def _work(self, file: AsyncFileIO) -> None:
        while (request := await self._requests.get()) is not None:
            error: DeviceError | None = None
            try:
                await self._move(file, request)
            except OSError as failure:
                error = DeviceError(
                    f"{self.path} at byte {request.offset}: {request.op.value} failed: {failure}"
                )
            self._completions.put(Completion(request.tag, error))
        self._requests.put_nowait(None)  # the next worker stops as well

    async def _move(self, file: AsyncFileIO, request: IoRequest) -> None:
        if request.op is Op.SYNC:
            await self._loop.run_in_executor(self._executor, os.fdatasync, file.fileno())
            return
        await file.seek(request.offset)
        for buffer in request.buffers:
            moved = 0
            while moved < len(buffer):  # a short transfer is resumed, never taken for whole
                rest = buffer[moved:]
                if request.op is Op.READ:
                    count = await file.readinto(rest)
                else:
                    count = await file.write(rest)
                if not count:
                    raise OSError(errno.EIO, f"{moved} of {len(buffer)} bytes, then nothing")
                moved += count
