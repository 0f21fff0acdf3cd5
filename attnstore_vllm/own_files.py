# SPDX-License-Identifier: Apache-2.0
"""Files and directories of ours that are found by name: opened, looked at, and then believed.

A name does not say who made what it names. So a file is opened without following a link and
without waiting for the other end of a pipe. Then the open file is looked at: it is regular, it is
this user's, and no other user may write to it. A directory is this user's or root's.

A group counts as others, with two exceptions. A user's private group has the user's number: many
Linux systems make one, and let new files be writable by it. And a directory with the setgid bit was
given to its group on purpose. Kubernetes' `fsGroup` does that, to all files in it too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UNKNOWN_UID = int(Path("/proc/sys/kernel/overflowuid").read_text())
"""In a user namespace all users that it does not know have this number, and one that it knows."""
_NO_FILE = {errno.ELOOP: "is a link", errno.ENXIO: "is a pipe, a socket or a device"}


class NotOursError(OSError):
    """The file or directory of this name is none that this user may rely on.

    Args:
        why: begins with a verb, as in "belongs to user 7".
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))
        self.why = why

    def __str__(self) -> str:
        return f"{self.filename} {self.why}"


# ---- files ---------------------------------------------------------------------------------


def open_regular(path: Path, flags: int) -> int:
    """The descriptor of a regular file of any owner; the caller closes it. Not for what is
    believed.

    Args:
        flags: as of os.open(). What O_CREAT makes has mode 0600.
    Raises: NotOursError for a link, a pipe or what else is no regular file; OSError.
    """
    assert not flags & os.O_TRUNC, "nothing is emptied before it was looked at"
    try:
        fd = os.open(path, flags | _OPEN, 0o600)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotOursError(path, f"{_NO_FILE[error.errno]}; expected a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotOursError(path, "is no regular file; remove it")
        os.set_blocking(fd, True)  # io_uring gives up at once on a file that may not block
    except OSError:
        os.close(fd)
        raise
    return fd


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a regular file of this user's, that no other may write to; the caller's.

    Args: as open_regular() has them.
    Raises: NotOursError; OSError.
    """
    fd = open_regular(path, flags)
    try:
        _check_file(path, fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_ours(fd: int, found: os.stat_result) -> bool:
    """Whether an open file, directory or socket is this user's.

    A server may run under the number that all strangers have in its user namespace. Then the kernel
    is asked, which lets the owner alone set a mode: it is set to what it is.
    """
    if found.st_uid != os.geteuid() or found.st_uid != _UNKNOWN_UID:
        return found.st_uid == os.geteuid()
    try:
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(found.st_mode))
    except OSError:
        return False
    return True


def owner_of(found: os.stat_result) -> str:
    """In words, of what is not ours."""
    is_known = found.st_uid != os.geteuid()
    return f"user {found.st_uid}" if is_known else "a user that this namespace does not know"


def _check_file(path: Path, fd: int) -> None:
    found = os.fstat(fd)
    if not is_ours(fd, found):
        raise NotOursError(
            path, f"belongs to {owner_of(found)}; expected this user, {os.geteuid()}. Remove it"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IWOTH or (_group_may_write(found) and not _is_given_to_group(path.parent)):
        raise NotOursError(
            path, f"has mode {mode:04o}, so others may write to it; run: chmod go-w {path}"
        )


def _group_may_write(found: os.stat_result) -> bool:
    """Whether a group may that has others in it."""
    is_private = found.st_uid == found.st_gid not in (0, _UNKNOWN_UID)
    return bool(found.st_mode & stat.S_IWGRP) and not is_private


def _is_given_to_group(directory: Path) -> bool:
    return bool(os.stat(directory).st_mode & stat.S_ISGID)


@contextmanager
def errors_with(path: Path) -> Iterator[None]:
    """An error of an open file has no path: it gets this one. Raises: OSError."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def read_own(path: Path, most_bytes: int) -> bytes:
    """The content of a file of ours. Raises: NotOursError; OSError, also if it has more bytes."""
    with errors_with(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return data


def replace_own(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put a file of ours in the place of what has the name. It is there whole, or the old one is.

    Args:
        durable: also after a power loss. Then it waits for the disk twice.
    Raises: OSError.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # what a kill left, or a stranger's link: the name alone goes
    fd = open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with errors_with(path), os.fdopen(fd, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
    if not durable:
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with errors_with(path.parent):
            os.fsync(directory)
    finally:
        os.close(directory)


def take_old_name(old: Path, new: Path) -> None:
    """A file of ours that a version before has written gets its new name, if none has that yet.
    It is looked at when it is read. Raises: OSError."""
    if not os.path.lexists(new):
        with suppress(FileNotFoundError):  # there is none, or a sibling was first
            os.rename(old, new)


def read_given(path: Path, most_bytes: int = 1 << 20) -> bytes:
    """The content of a file that the user names: a link is followed, as those of Kubernetes'
    secrets are, and any user may own it. A pipe is not waited for.

    Raises: NotOursError if it is no regular file; OSError, also if it has more bytes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotOursError(path, "is no regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return data


# ---- directories ---------------------------------------------------------------------------


def check_directory(path: Path) -> None:
    """Look whether a directory may hold files of ours. Raises: NotOursError; OSError.

    It must be this user's or root's, and others may not write to it. Nor may they put another in
    its place: they could if they may write to its parent and that has no sticky bit, as /tmp has.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        found = os.fstat(fd)
        is_believed = found.st_uid == 0 or is_ours(fd, found)
    finally:
        os.close(fd)
    if not stat.S_ISDIR(found.st_mode):
        raise NotOursError(path, "is a link or a file; it must be a directory")
    mode = stat.S_IMODE(found.st_mode)
    if not is_believed:
        raise NotOursError(
            path,
            f"belongs to {owner_of(found)}; expected this user, {os.geteuid()}, or root. Run: "
            f"chown -R {os.geteuid()} {path}, or name another directory",
        )
    if mode & stat.S_IWOTH or (_group_may_write(found) and not mode & stat.S_ISGID):
        raise NotOursError(
            path, f"has mode {mode:04o}, so others may write to it; run: chmod go-w {path}"
        )
    check_parent(path)


def check_parent(path: Path) -> None:
    """Look whether others may put another directory in the place of this one, which may be yet to
    be made. Raises: NotOursError; OSError."""
    mode = stat.S_IMODE(os.stat(path.parent).st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise NotOursError(
            path,
            f"lies in {path.parent}, which has mode {mode:04o}: others may put another directory "
            f"in its place; run: chmod +t {path.parent}, or chmod o-w {path.parent}",
        )


def make_directory(path: Path) -> None:
    """Make a directory for files of ours, 0700, if there is none, and look at it as
    check_directory() does. Raises: NotOursError; OSError."""
    path.mkdir(mode=0o700, exist_ok=True)
    check_directory(path)
