# SPDX-License-Identifier: Apache-2.0
"""The one seam between the store and a disk: batches go in, completions come out.

Nothing above knows of files. Implementations: io/uring_device.py (Linux, native),
io/aiofiles_device.py (any file system) and the test doubles (attnstore_lab/testing/devices.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from attnstore_vllm.errors import DeviceError

ALIGNMENT_BYTES = 4096
"""Offsets, lengths and buffer addresses are multiples of this, so that O_DIRECT is possible."""

CHECKSUM_BYTES = 16
"""XXH3-128, in the byte order of its canonical representation (big-endian)."""


class Op(Enum):
    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class Seal(NamedTuple):
    """Before a WRITE: put the checksum of buffer `of` into buffer 0 at byte `at`.

    The CHECKSUM_BYTES at `at` are zero when the request is submitted.
    """

    of: int
    at: int


@dataclass(frozen=True, slots=True)
class IoRequest:
    """One transfer between [offset, offset + sum of the buffers' lengths) and the buffers.

    Lifetime: the caller keeps the buffers alive, writes none, and reads no READ buffer, from
    submit() until poll() has returned this tag. Tags in flight are distinct.

    With a `stride` (READ only) buffer i is read from offset + i * stride; the whole ends as one.

    `seals` (WRITE only) are carried out in their order, on the device's own threads, before any
    byte moves. With `checksum` (READ only) the last buffer's checksum is taken after it came.
    """

    tag: int
    op: Op
    offset: int = 0
    buffers: tuple[memoryview, ...] = ()
    seals: tuple[Seal, ...] = ()
    checksum: bool = False
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A request has ended: every byte was moved, or `error` says why not.

    `checksum`: of a READ's last buffer, if it was asked for; of a WRITE, what its first seal
    put in; else empty. Empty also after an error.
    """

    tag: int
    error: DeviceError | None
    checksum: bytes = b""


class Device(Protocol):
    """A place of fixed size for bytes. All methods may be called from any thread.

    Writes may reach the medium in any order, in part, or not at all, until a SYNC that was
    submitted after their completion has completed.
    """

    @property
    def size_bytes(self) -> int: ...

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """Queue the requests and return at once. Raises DeviceError if the device is closed."""

    def cancel(self, tags: Collection[int]) -> None:
        """Try to end these requests early; returns at once.

        Each still ends with exactly one completion: an error if it could be cancelled. One that
        the medium is at work on ends when the medium says so; only then are its buffers free.
        """

    def poll(self, timeout_s: float) -> list[Completion]:
        """Requests that have ended since the last poll; waits up to `timeout_s` for the first, or
        wake()."""

    def wake(self) -> None:
        """Make the poll that waits now, or the next one, return at once."""

    def close(self, timeout_s: float) -> bool:
        """Wait for what is in flight, `timeout_s` at most, then let go of the medium.

        Completions are lost. Returns False if requests were still in flight: their buffers must
        stay alive as long as the process; nothing waits for them any more.
        """
