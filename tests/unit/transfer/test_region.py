# SPDX-License-Identifier: Apache-2.0
"""Which regions of shared memory are dead: told by locks, and not by age."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from pathlib import Path

import pytest

from attnstore_vllm.transfer import region
from attnstore_vllm.transfer.region import (
    PREFIX,
    create,
    dead,
    find,
    leave,
    remove_if_dead,
    sweep,
)


def test_sweep_removes_what_nobody_holds_however_young(tmp_path: Path) -> None:
    dead, held, other = tmp_path / f"{PREFIX}dead", tmp_path / f"{PREFIX}held", tmp_path / "other"
    for path in (dead, held, other):
        path.write_bytes(b"x")
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    (tmp_path / f"{PREFIX}folder").mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}pipe")
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert sweep(tmp_path) == [dead.name]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {held.name, "other"} | {f"{PREFIX}{name}" for name in ("link", "folder", "pipe")}
    assert sweep(tmp_path) == [held.name]


def test_the_dead_are_counted_and_stay(tmp_path: Path) -> None:
    gone, held = tmp_path / f"{PREFIX}gone", tmp_path / f"{PREFIX}held"
    for path in (gone, held, tmp_path / "other"):
        path.write_bytes(b"x" * (1 << 20))
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert dead(tmp_path) == {gone.name: gone.stat().st_blocks * 512}
        assert sweep(tmp_path) == [gone.name], "it was there, and nobody holds it"
    assert dead(tmp_path) == {held.name: held.stat().st_blocks * 512}


def test_another_users_regions_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{PREFIX}theirs").write_bytes(b"x")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # root may open and remove all
    assert dead(tmp_path) == {}
    assert sweep(tmp_path) == []


def test_a_sweep_between_creating_and_locking_takes_nothing_from_a_living_creator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{PREFIX}x"
    locks: list[list[str]] = []
    lock = region.lock

    def lock_after_a_sweep(fd: int) -> bool:
        locks.append(sweep(tmp_path) if len(locks) < 2 else [])
        return lock(fd)

    monkeypatch.setattr(region, "lock", lock_after_a_sweep)
    fd = create(path)
    assert fd is not None
    assert locks == [[path.name], [path.name], []]
    assert os.fstat(fd).st_ino == path.stat().st_ino, "the region has no name"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sweep(tmp_path) == []
    assert create(path) is None
    leave(fd, path, is_creator=True)
    assert not path.exists()
    assert find(path) is None


def test_starts_that_sweep_all_the_time_lose_no_region(tmp_path: Path) -> None:
    """The race itself: creators against sweeps, each region looked at as long as it is held."""
    ended = threading.Event()

    def sweep_on() -> None:
        while not ended.is_set():
            sweep(tmp_path)

    lost: list[str] = []

    def start(number: int) -> None:
        for attempt in range(200):
            path = tmp_path / f"{PREFIX}{number}-{attempt}"
            fd = create(path)
            assert fd is not None
            if not path.exists() or os.fstat(fd).st_nlink != 1:
                lost.append(path.name)
            leave(fd, path, is_creator=True)

    sweeps = [threading.Thread(target=sweep_on) for _ in range(2)]
    starts = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for thread in (*sweeps, *starts):
        thread.start()
    for thread in starts:
        thread.join()
    ended.set()
    for thread in sweeps:
        thread.join()
    assert lost == []
    assert list(tmp_path.iterdir()) == []


def test_who_removes_a_dead_region_does_not_remove_its_successor(tmp_path: Path) -> None:
    path = tmp_path / f"{PREFIX}x"
    path.write_bytes(b"")
    seen = [find(path), find(path)]
    assert seen[0] is not None and seen[1] is not None
    assert remove_if_dead(seen[0], path)
    os.close(seen[0])
    fd = create(path)
    assert fd is not None
    assert remove_if_dead(seen[1], path)
    os.close(seen[1])
    assert path.exists()
    leave(fd, path, is_creator=True)
