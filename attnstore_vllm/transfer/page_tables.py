# SPDX-License-Identifier: Apache-2.0
"""Pages of shared memory that this process has not mapped yet, mapped ahead of the first copies.

Memory that is there still costs a fault for each page that a process touches first: then a copy
takes some ten times as long. Page-locking maps all pages too, but one by one: it goes some ten
times faster over pages that are mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

PIECE_BYTES = 16 << 20
"""Bytes that are mapped in one go: some milliseconds."""
PAUSE_S = 0.005
"""Between two pieces: what else the process does goes on."""
JOIN_S = 1.0
THREADS_MAX = 16
"""Threads that map at a time: each maps some 2 GiB/s, and page-locking takes some 15."""
LARGE_PIECE_BYTES = 256 << 20
"""Bytes that one of them maps in one go."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # since Linux 5.14; the mmap module has no names
_libc = ctypes.CDLL(None)


class Unmapped:
    """The pages of these buffers. Used by one thread.

    Args:
        writes: they are for writing too. It changes no byte, also while others write.
    """

    def __init__(self, buffers: Sequence[memoryview | mmap.mmap], *, writes: bool) -> None:
        self._advice = _MADV_POPULATE_WRITE if writes else _MADV_POPULATE_READ
        self._pieces = [
            (buffer, at, min(PIECE_BYTES, len(buffer) - at))
            for buffer in reversed(buffers)
            for at in reversed(range(0, len(buffer), PIECE_BYTES))
        ]

    def map_some(self) -> bool:
        """Map the next piece. The GIL is released. False: there was none left."""
        if not self._pieces:
            return False
        buffer, at, size = self._pieces.pop()
        _map(np.frombuffer(buffer, np.uint8).ctypes.data + at, size, self._advice)
        return True

    def forget(self) -> None:
        """Keep no buffer any more."""
        self._pieces.clear()


class MapInOrder:
    """Maps memory for writing, from its beginning to its end, on several threads.

    It is open while it is used, as a context; after that no thread of it runs.

    Args:
        address: of the first page; num_bytes: to the end of the last.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        num_pieces = -(-num_bytes // LARGE_PIECE_BYTES)
        num_threads = min(THREADS_MAX, len(os.sched_getaffinity(0)), num_pieces)
        self._threads = ThreadPoolExecutor(max(1, num_threads), "attnstore-map")
        self._pieces = [
            self._threads.submit(
                _map, address + at, min(LARGE_PIECE_BYTES, num_bytes - at), _MADV_POPULATE_WRITE
            )
            for at in range(0, num_bytes, LARGE_PIECE_BYTES)
        ]

    def __enter__(self) -> MapInOrder:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def wait(self, end: int, timeout_s: float) -> None:
        """Until the first `end` bytes are mapped, or the time is over."""
        wait(self._pieces[: -(-end // LARGE_PIECE_BYTES)], timeout_s)


class MapAhead:
    """Maps the pages of a buffer, for writing, on a thread of its own that ends with that."""

    def __init__(self, buffer: memoryview) -> None:
        self._stopping = threading.Event()
        unmapped = Unmapped([buffer], writes=True)
        self._thread = threading.Thread(
            target=_map_all, args=(unmapped, self._stopping), name="attnstore-map", daemon=True
        )
        # A thread that comes back from native code while the interpreter ends aborts the process.
        self._end = weakref.finalize(self, _end, self._thread, self._stopping, os.getpid())
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """It is over after this, all mapped or not."""
        self._end()


def _map(address: int, num_bytes: int, advice: int) -> None:
    # Older kernels refuse it, and then what touches the pages first waits.
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)


def _map_all(unmapped: Unmapped, stopping: threading.Event) -> None:
    while not stopping.is_set() and unmapped.map_some():
        stopping.wait(PAUSE_S)
    unmapped.forget()


def _end(thread: threading.Thread, stopping: threading.Event, pid: int) -> None:
    if os.getpid() == pid:  # a fork's child has no such thread
        stopping.set()
        thread.join(JOIN_S)
