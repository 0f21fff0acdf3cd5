# SPDX-License-Identifier: Apache-2.0
"""Whether other files are in the place of those that vLLM has loaded, since it began to start.

vLLM tells no connector of its model before the model is loaded, so nothing can be noted by then.
The kernel notes it: a rename sets the time of change of what was moved, and a new link has its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE_CLOCK_S = 0.01
"""The clock of file systems ticks some milliseconds late."""


def check_unmoved(files: Iterable[Path], begun_at: float) -> None:
    """Raise ValueError for a file that was changed since, or to whose place another thing led.

    A file of the hub's cache is new where this start has downloaded it, and never changes: of its
    way only the links of directories count.

    Args:
        begun_at: Unix seconds, by the clock of file systems.
    Raises: OSError. Cost: a system call or two for each file and each directory on the way.
    """
    seen: set[Path] = set()
    for file in files:
        changed_s = file.stat().st_ctime
        is_blob = _is_of_the_hub(file)
        if changed_s > begun_at and not is_blob:
            raise ValueError(f"{file} has changed while the server was starting")
        own = () if is_blob else (file.absolute().parent, file.resolve().parent)
        for place in file.absolute().parents if is_blob else _way(file):
            if place in seen:
                continue
            seen.add(place)
            found = place.lstat()
            if found.st_ctime <= begun_at:
                continue
            if stat.S_ISLNK(found.st_mode):
                raise ValueError(
                    f"{place} has led to another place since the server began to start"
                )
            if not is_blob and _was_moved(place, found, begun_at, is_own=place in own):
                raise ValueError(
                    f"{place} may be in another's place since the server began to start"
                )


def check_branch(snapshot: Path, revision: str | None, begun_at: float) -> None:
    """Raise ValueError if this revision may have been another snapshot of the hub's cache since."""
    branch = snapshot.parent.parent / "refs" / (revision or "main")
    others = (place for place in snapshot.parent.iterdir() if place != snapshot)
    # With no others this start has downloaded it: then there was no other commit before.
    if branch.is_file() and branch.stat().st_ctime > begun_at and any(others):
        raise ValueError(f"{branch} has moved to another commit while the server was starting")


def _is_of_the_hub(file: Path) -> bool:
    """Whether it is <repo>/snapshots/<commit>/.., a link to a file of that repo's blobs. Links into
    another directory of that name are anyone's, and may be led elsewhere."""
    if not file.is_symlink():
        return False
    blobs = file.resolve().parent
    return blobs.name == "blobs" and blobs.parent / "snapshots" in file.parent.resolve().parents


def _was_moved(place: Path, found: os.stat_result, begun_at: float, *, is_own: bool) -> bool:
    """Whether a directory that has changed since may be one that was renamed.

    It changes, too, when a file is made in it, which sets the time of the last write to the same.
    A rename changes what is around it as well. On the way to shared directories both happen by
    themselves; in the files' own directory (`is_own`) a deploy may leave its mark after a rename.
    """
    if not is_own and found.st_ctime_ns == found.st_mtime_ns:
        return False
    return place.parent.stat().st_ctime > begun_at


def _way(file: Path) -> Iterator[Path]:
    """All that leads to a file: directories, and links with all that leads to their targets.

    The file exists, so the kernel has followed its links: there are 40 at most, and no circle.
    """
    todo = [file.absolute(), file.resolve()]
    while todo:
        end = todo.pop()
        for place in (end, *end.parents):
            yield place
            if place.is_symlink():
                todo.append(place.parent / os.readlink(place))
