# SPDX-License-Identifier: Apache-2.0
"""The generation: a name of the last reset that all KV of an engine comes after.

Engines share KV only while their generations are equal. The group's file names the last reset of
any of them. The first engine that is reset makes a new name; each of the others takes that one with
its own reset, when all that it had has gone. So after a reset no engine gets KV from one that has
not been reset yet. Both are kept in files, since KV on NVMe outlives the process.

That holds from engines of one generation on. One that missed a reset of others takes their name
with its next one, and their KV: of after the reset that it missed, and perhaps of before this one
(docs/faults.md). The same after a reset that failed, which the caller is told.

There is one of each for every namespace: a reset is of the model that runs. A generation is used
only once it is on the disk; until then the engine has a name that no other has.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from attnstore_vllm.own_files import (
    errors_with,
    make_directory,
    open_own,
    read_own,
    replace_own,
    take_old_name,
)

logger = logging.getLogger(__name__)

OLD_FILE_NAME = "peers.generation"
"""A version before had one for all namespaces: the first that starts takes it."""
SIZE_BYTES = 16
OUT = b"-"
"""Behind an engine's own in its file: it left that one, and is of none before its next reset."""


def file_name(namespace: bytes) -> str:
    """In the directory of each engine, and in the group's."""
    return f"peers-{namespace.hex()[:32]}.generation"


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
        namespace: of the store.
    """

    def __init__(self, own: Path, group: Path, namespace: bytes) -> None:
        name = file_name(namespace)
        self._own, self._group = own / name, group / name
        self.value = secrets.token_bytes(SIZE_BYTES)
        self._left: bytes | None = None
        """The group's that this engine had last, be it in use or not. None: it had none yet."""
        try:
            for path in (self._own, self._group):
                take_old_name(path.with_name(OLD_FILE_NAME), path)
            kept = self._kept()
            if kept is None:
                kept = self._of_group(lambda _: False)
                replace_own(self._own, kept, durable=True)
            self._left = kept[:SIZE_BYTES] if len(kept) >= SIZE_BYTES else None
            if len(kept) == SIZE_BYTES:
                self.value = kept
        except OSError as error:
            self._say(error)

    def advance(self) -> None:
        """All KV of this engine has gone: it is of the group's newest generation from now on, and
        of none that it had before, or that was there when it knew none.

        Raises: OSError if a restart may still find the one before.
        """
        left, self.value = self._left, secrets.token_bytes(SIZE_BYTES)
        try:
            # Noted at once: if the next call fails, the reset that is tried again comes after it.
            value = self._left = self._of_group(lambda found: left is None or found == left)
            replace_own(self._own, value, durable=True)
            self.value = value
        except OSError as error:
            self._say(error)
            self._keep_to_itself(left)

    def leave(self) -> None:
        """From now on it is of no generation that others have. A restart is of the one before."""
        self.value = secrets.token_bytes(SIZE_BYTES)

    def _keep_to_itself(self, left: bytes | None) -> None:
        """After a restart, too, it is of no generation that others have, and leaves the same one
        with its next reset. Args: left: with this one. Raises: OSError."""
        try:
            replace_own(self._own, (self._left or b"") + OUT, durable=True)
        except OSError:
            self._own.unlink(missing_ok=True)  # a restart takes the group's ...
            if self._left == left:  # ... which may be of before
                raise

    def _kept(self) -> bytes | None:
        """None: it has begun none."""
        try:
            return read_own(self._own, SIZE_BYTES + len(OUT))
        except FileNotFoundError:
            return None

    def _of_group(self, is_left: Callable[[bytes], bool]) -> bytes:
        """The group's; a new one if that is left, or if there is none. Durable when it returns."""
        make_directory(self._group.parent)
        fd = open_own(self._group, os.O_RDWR | os.O_CREAT)
        try:
            with errors_with(self._group):
                _lock(fd)
                found = os.pread(fd, SIZE_BYTES, 0)
                if len(found) != SIZE_BYTES or is_left(found):
                    found = secrets.token_bytes(SIZE_BYTES)
                    os.pwrite(fd, found, 0)
                fcntl.flock(fd, fcntl.LOCK_UN)  # others wait for it less long than a disk may take
                os.fsync(fd)
                return found
        finally:
            os.close(fd)

    def _say(self, error: OSError) -> None:
        logger.warning("this engine shares no KV with its siblings: %s", error)
