# SPDX-License-Identifier: Apache-2.0
"""Files that hold a secret, which settings name: the shared tier's, and salts of tenants."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.own_files import is_ours


def read_secret_file(path: Path, what: str, has: str, bytes_max: int) -> bytes:
    """All bytes of a file but white space at its ends, at most one more than `bytes_max`. Raises
    ConfigError, in which they are not.

    Links are followed, since Kubernetes mounts a Secret by way of some: what is verified is the
    file that was opened. Its group may read it where its directory has the setgid bit: so does
    `fsGroup` give a Secret to a pod whose user is not root.

    Args:
        what: the beginning of an error: "quotas.gold.salt_file is '/run/x', which".
        has: what the file should have, as in "secret".
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be read: {error.strerror}; give the server's user the right to, or "
            "name another file"
        ) from error
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{what} is no regular file; name a file that has the {has}")
        if found.st_uid != 0 and not is_ours(opened, found):
            raise ConfigError(
                f"{what} belongs to user {found.st_uid}, who can change it; it must belong to the "
                f"server's user ({os.geteuid()}) or to root"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & (0o037 if _is_given_to_group(path) else 0o077):
            raise ConfigError(
                f"{what} has mode {mode:04o}: group or others may read or change it; run chmod 400 "
                f"on it (defaultMode: 0400 in Kubernetes), and make a new {has} if others may have "
                "read this one"
            )
        return os.read(opened, bytes_max + 1).strip()
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}; name another file") from error
    finally:
        os.close(opened)


def _is_given_to_group(path: Path) -> bool:
    return bool(os.stat(path.resolve().parent).st_mode & stat.S_ISGID)
