# SPDX-License-Identifier: Apache-2.0
"""Named regions of shared memory: who holds one lives, and a dead one is removed.

A process that uses a region has a shared lock on it (flock). The kernel takes the lock away with
the process, however that ends, and sees it across containers that share /dev/shm. A region without
a lock is dead.

Between creating a file and locking it no process holds it. So its creator looks, once it has the
lock, whether the file still has its name. If not, a sweep took it for a dead one, and another is
made. Hence no sweep has to guess from a file's age, and a start right after a killed one finds
room.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

from attnstore_vllm.own_files import open_own

logger = logging.getLogger(__name__)

PREFIX = "attnstore-"


def create(path: Path) -> int | None:
    """The descriptor of a new, empty region with this process's lock; None if the name is taken."""
    while True:
        try:
            fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return None
        if lock(fd):
            return fd
        os.close(fd)


def create_anew(path: Path) -> int:
    """The descriptor of a new, empty region under a name that a dead one may have.

    Raises: FileExistsError if a living process holds the region of that name; NotOursError.
    """
    while True:
        fd = create(path)
        if fd is not None:
            return fd
        fd = find(path)
        if fd is not None:
            is_dead = remove_if_dead(fd, path)
            os.close(fd)
            if not is_dead:
                raise FileExistsError(f"{path} is held by a living process")


def find(path: Path) -> int | None:
    """The descriptor of a region, without a lock; None if there is none of that name.

    Raises: NotOursError if another user, or no regular file, has the name; OSError.
    """
    try:
        return open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return None


def lock(fd: int) -> bool:
    """Hold the region from now on; False if it has lost its name, so that it cannot be found."""
    fcntl.flock(fd, fcntl.LOCK_SH)  # waits at most for who removes it now
    return os.fstat(fd).st_nlink > 0


def remove_if_dead(fd: int, path: Path) -> bool:
    """Unlink the region `fd` at `path` if no process holds it; False, with no lock, if one does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if os.fstat(fd).st_nlink:  # else the name is gone, and may be another region's already
        path.unlink(missing_ok=True)
        logger.warning("removed %s, which a start that was killed left behind", path)
    return True


def leave(fd: int, path: Path, is_creator: bool) -> None:
    """Give the region up. Its creator takes the name away too: the others cannot go on alone."""
    if is_creator and os.fstat(fd).st_nlink:
        path.unlink(missing_ok=True)
    os.close(fd)


def sweep(directory: Path) -> list[str]:
    """Remove this user's regions that no living process holds; returns their names."""
    return [path.name for path, fd in _ours(directory) if remove_if_dead(fd, path)]


def dead(directory: Path) -> dict[str, int]:
    """This user's regions that no living process holds: bytes of memory by name. They stay.

    Each is locked for an instant. To a start that looks just then it is held, as by a sweep.
    """
    found = {}
    for path, fd in _ours(directory):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        found[path.name] = os.fstat(fd).st_blocks * 512
    return found


def _ours(directory: Path) -> Iterator[tuple[Path, int]]:
    """This user's regions, each with a descriptor that is closed when the next is asked for."""
    for path in directory.glob(f"{PREFIX}*"):
        try:
            fd = open_own(path, os.O_RDWR)
        except OSError:  # gone meanwhile, a link, or another user's
            continue
        try:
            yield path, fd
        finally:
            os.close(fd)


def sweep_at_exit(directory: Path) -> None:
    """Once this process and its children have ended. A killed child takes no name away itself."""
    Finalize(None, sweep, (directory,), exitpriority=-1)  # below 0: after children were joined
