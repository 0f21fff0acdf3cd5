# SPDX-License-Identifier: Apache-2.0
"""The generation: a name of the last reset that all KV of an engine comes after.

Engines share KV only while their generations are equal. The group's file names the last reset of
any of them. The first engine that is reset makes a new name; each of the others takes that one with
its own reset, when all that it had has gone. So after a reset nobody gets KV of before it from one
that has not been reset yet. Both are kept in files, since KV on NVMe outlives the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

FILE_NAME = "peers.generation"
SIZE_BYTES = 16


LOCK_TRIES, LOCK_PAUSE_S = 50, 0.002
"""Others hold the group's file for some microseconds, unless they are stopped meanwhile."""


def _lock(fd: int) -> None:
    for _ in range(LOCK_TRIES):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    raise TimeoutError("another engine holds the group's generation")


class Generation:
    """The generation of one engine.

    Args:
        own: the directory of its store, whose lock it holds.
        group: the directory that all engines of the group know. It may be another disk's, on which
            no engine has begun yet: then it is made.
    """

    def __init__(self, own: Path, group: Path) -> None:
        self._own, self._group = own / FILE_NAME, group / FILE_NAME
        self.value = secrets.token_bytes(SIZE_BYTES)
        try:
            kept = self._own.read_bytes() if self._own.exists() else b""
            self.value = kept if len(kept) == SIZE_BYTES else self._of_group(None)
            self._own.write_bytes(self.value)
        except OSError as error:
            self._say(error)

    def advance(self) -> None:
        """All KV of this engine has gone: it is of the group's newest generation from now on."""
        before, self.value = self.value, secrets.token_bytes(SIZE_BYTES)
        try:
            self.value = self._of_group(before)
            self._own.write_bytes(self.value)
        except OSError as error:
            with suppress(OSError):
                self._own.unlink(missing_ok=True)
            self._say(error)

    def _of_group(self, before: bytes | None) -> bytes:
        """The group's; a new one if it is `before`, or if there is none."""
        self._group.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self._group, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
            found = os.pread(fd, SIZE_BYTES, 0)
            if len(found) != SIZE_BYTES or found == before:
                found = secrets.token_bytes(SIZE_BYTES)
                os.pwrite(fd, found, 0)
            return found
        finally:
            os.close(fd)

    def _say(self, error: OSError) -> None:
        logger.warning("this engine shares no KV with its siblings: %s", error)
