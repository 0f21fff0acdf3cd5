# SPDX-License-Identifier: Apache-2.0
"""Weights that are put in the place of others while a server starts, in any way a deploy has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnstore_vllm.identity.moved_files import check_unmoved

NAME = "model.safetensors"
TICK_S = 0.05
"""More than one of the file system's clock."""


def release(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True)
    (directory / NAME).write_bytes(content)
    return directory


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """`v1` and `v2`; `current` is still to be made."""
    for version in ("v1", "v2"):
        release(tmp_path / version, version.encode())
    return tmp_path


def begin() -> float:
    """As a server's start, between two ticks."""
    time.sleep(TICK_S)
    begun_at = time.time()
    time.sleep(TICK_S)
    return begun_at


def relink(link: Path, target: Path | str) -> None:
    link.with_name("new").symlink_to(target)
    link.with_name("new").replace(link)


def directory_renamed(models: Path) -> None:
    (models / "current").rename(models / "old")
    (models / "v2").rename(models / "current")


def plain(models: Path) -> Path:
    (models / "v1").rename(models / "current")
    return models / "current" / NAME


def linked_file(models: Path) -> Path:
    (models / "current").mkdir()
    (models / "current" / NAME).symlink_to(models / "v1" / NAME)
    return models / "current" / NAME


def linked_twice(models: Path) -> Path:
    """current/model.safetensors -> ../stable -> v1/model.safetensors"""
    (models / "current").mkdir()
    (models / "stable").symlink_to(Path("v1") / NAME)
    (models / "current" / NAME).symlink_to(Path("..") / "stable")
    return models / "current" / NAME


def linked_directory(models: Path) -> Path:
    (models / "current").symlink_to("v1")
    return models / "current" / NAME


def below_a_release(models: Path) -> Path:
    for version in ("v1", "v2"):
        (models / f"r{version}").mkdir()
        (models / version).rename(models / f"r{version}" / "model")
    (models / "rv1").rename(models / "release")
    return models / "release" / "model" / NAME


def release_renamed(models: Path) -> None:
    (models / "release").rename(models / "old")
    (models / "rv2").rename(models / "release")


def pool(models: Path) -> Path:
    """A pool of one's own, of links into a directory that is called as the hub's."""
    (models / "blobs").mkdir()
    for version in ("v1", "v2"):
        (models / version / NAME).rename(models / "blobs" / version)
        (models / version / NAME).symlink_to(Path("../blobs") / version)
    return plain(models)


def target_renamed(models: Path) -> None:
    (models / "v1").rename(models / "old")
    (models / "v2").rename(models / "v1")


WAYS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "directory renamed": (plain, directory_renamed),
    "release renamed": (below_a_release, release_renamed),
    "file renamed over": (
        plain, lambda models: (models / "v2" / NAME).rename(models / "current" / NAME),
    ),
    "link of the file": (
        linked_file, lambda models: relink(models / "current" / NAME, models / "v2" / NAME),
    ),
    "link of a link": (
        linked_twice, lambda models: relink(models / "stable", Path("v2") / NAME),
    ),
    "link of the directory": (linked_directory, lambda models: relink(models / "current", "v2")),
    "what a link leads to": (linked_directory, target_renamed),
    "what a file's link leads to": (linked_file, target_renamed),
    "link into blobs of one's own": (
        pool, lambda models: relink(models / "current" / NAME, "../blobs/v2"),
    ),
    "directory of links into blobs": (pool, directory_renamed),
    "a blob of one's own": (
        pool, lambda models: (models / "blobs" / "v2").rename(models / "blobs" / "v1"),
    ),
    "a blob written in place": (
        pool, lambda models: (models / "blobs" / "v1").write_bytes(b"v2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_another_version_in_its_place(models: Path, how: str) -> None:
    """What vLLM has loaded lay there before: it has not the name of what lies there now."""
    prepare, deploy = WAYS[how]
    file = prepare(models)
    begun_at = begin()
    check_unmoved([file], begun_at)
    loaded = file.read_bytes()
    deploy(models)
    assert file.read_bytes() != loaded
    with pytest.raises(ValueError, match=r"the server (was starting|began to start)"):
        check_unmoved([file], begun_at)
    check_unmoved([file], begin())  # the next start, which loads what lies there


@pytest.mark.parametrize("prepare", [plain, linked_file, linked_directory, below_a_release])
def test_what_else_is_done_around_it(models: Path, prepare: Callable[[Path], Path]) -> None:
    """Files that others make beside the model, or in its directory, move nothing."""
    file = prepare(models)
    begun_at = begin()
    release(models / "v3", b"v3")
    check_unmoved([file], begun_at)


def test_busy_directories_above(models: Path) -> None:
    """As of a shared disk: others make models beside ours, and directories beside theirs."""
    (models / "shared" / "models").mkdir(parents=True)
    (models / "v1").rename(models / "shared" / "models" / "v1")
    begun_at = begin()
    for place in (models / "note", models / "shared" / "note", models / "shared/models/note"):
        place.touch()
    check_unmoved([models / "shared" / "models" / "v1" / NAME], begun_at)


def test_a_mark_that_a_deploy_leaves_behind_its_rename(models: Path) -> None:
    file = plain(models)
    begun_at = begin()
    directory_renamed(models)
    time.sleep(TICK_S)
    (models / "current" / "deployed").touch()
    with pytest.raises(ValueError, match="in another's place"):
        check_unmoved([file], begun_at)


def test_a_file_made_in_the_directory_of_the_model(models: Path) -> None:
    file = plain(models)
    begun_at = begin()
    (models / "current" / "note").touch()
    check_unmoved([file], begun_at)


def test_a_snapshot_of_the_hub_may_be_new(tmp_path: Path) -> None:
    """This start has downloaded it, with all directories around it."""
    begun_at = begin()
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(b"v1")
    (snapshot / NAME).symlink_to(Path("../../blobs/1"))
    check_unmoved([snapshot / NAME], begun_at)
    relink(tmp_path / "m" / "link", "snapshots/c")
    with pytest.raises(ValueError, match="led to another place"):
        check_unmoved([tmp_path / "m" / "link" / NAME], begun_at)
