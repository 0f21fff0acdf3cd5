# SPDX-License-Identifier: Apache-2.0
"""The one seam between the store and a disk: batches go in, completions come out.

Nothing above knows of files. Implementations: io/aiofiles_device.py (any file system) and the
shipped test doubles in testing/devices.py, which wrap any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from attnstore_vllm.errors import DeviceError

ALIGNMENT_BYTES = 4096
"""Offsets, lengths and buffer addresses are multiples of this, so that O_DIRECT is possible."""


class Op(Enum):
    READ = "read"
    WRITE = "write"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class IoRequest:
    """One transfer between [offset, offset + sum of the buffers' lengths) and the buffers.

    Lifetime: the caller keeps the buffers alive, writes none, and reads no READ buffer, from
    submit() until poll() has returned this tag. Tags in flight are distinct.
    """

    tag: int
    op: Op
    offset: int = 0
    buffers: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A request has ended: every byte was moved, or `error` says why not."""

    tag: int
    error: DeviceError | None


class Device(Protocol):
    """A place of fixed size for bytes. All methods may be called from any thread.

    Writes may reach the medium in any order, in part, or not at all, until a SYNC that was
    submitted after their completion has completed.
    """

    @property
    def size_bytes(self) -> int: ...

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """Queue the requests and return at once. Raises DeviceError if the device is closed."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """What has ended since the last poll; waits up to `timeout_s` for the first, or wake()."""

    def wake(self) -> None:
        """Make the poll that waits now, or the next one, return at once."""

    def close(self) -> None:
        """Wait for what is in flight, then let go of the medium. Completions are lost."""
