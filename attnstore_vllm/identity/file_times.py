# SPDX-License-Identifier: Apache-2.0
"""Whether a file's time of change can be believed: an image has the times that its maker chose, and
a FUSE file system those that its program says. Two files there may have all of a Stamp in common.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_IMAGES = frozenset(
    {
        0x73717368,  # squashfs
        0xE0F5E1E2,  # erofs
        0x28CD3D45,  # cramfs
        0x7275,  # romfs
        0x9660,  # iso9660
        0x15013346,  # udf
        0x65735546,  # FUSE
    }
)
"""By statfs(2)'s f_type."""
_LOCAL = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # XFS
        0x9123683E,  # btrfs
        0xF2F52010,  # F2FS
        0x2FC12FC1,  # ZFS
        0x01021994,  # tmpfs
    }
)
"""Where the kernel sets the time of change, if it may write there at all."""
_STATFS_BYTES = 256
"""More than any architecture's struct statfs, which begins with f_type, a long."""


def keeps_changes(file: Path, found: os.stat_result) -> bool:
    """Whether a change of the file shows in its time of change.

    On local file systems that are written to it does. On others, and on what is mounted read-only
    (it may be an image), that time has to be another than the one that a user can set: so a
    maker of files did not choose it.

    Raises: OSError. Cost: two system calls.
    """
    kind = file_system(file)
    if kind in _IMAGES:
        return False
    is_read_only = os.statvfs(file).f_flag & os.ST_RDONLY
    return (kind in _LOCAL and not is_read_only) or found.st_ctime_ns != found.st_mtime_ns


def file_system(file: Path) -> int:
    """statfs(2)'s f_type, which Python's own statvfs() lacks. Raises OSError."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(file), found):
        raise OSError(ctypes.get_errno(), "statfs", str(file))
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF
