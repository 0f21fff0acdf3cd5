# SPDX-License-Identifier: Apache-2.0
"""A generation that could not be noted, and one that a power loss meets."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from attnstore_vllm.tiers.peers import generation
from attnstore_vllm.tiers.peers.generation import Generation
from tests.helpers import NAMESPACE


def engines_of(group: Path) -> list[Generation]:
    """Of dp0 and dp1, as they start."""
    dirs = [group / "dp0", group / "dp1"]
    for directory in dirs:
        directory.mkdir(exist_ok=True)
    return [Generation(directory, group, NAMESPACE) for directory in dirs]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_reset_that_was_not_noted_goes_back_to_no_generation_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Another engine was stopped while it held the group's file. The sibling was not reset."""
    monkeypatch.setattr(generation, "LOCK_TRIES", 2)
    here, sibling = engines_of(tmp_path)
    before = sibling.value
    with (tmp_path / generation.file_name(NAMESPACE)).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        here.advance()
    assert here.value != before
    if restarts:
        here = engines_of(tmp_path)[0]
    else:
        here.advance()
    assert here.value != before, "it would get KV of before its reset"


def test_who_knew_no_generation_joins_none_of_before_its_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "LOCK_TRIES", 2)
    (tmp_path / "dp1").mkdir()
    sibling = Generation(tmp_path / "dp1", tmp_path, NAMESPACE)
    before = sibling.value
    with (tmp_path / generation.file_name(NAMESPACE)).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        here = engines_of(tmp_path)[0]
    here.advance()
    assert here.value != before
    sibling.advance()
    assert here.value == sibling.value


def test_a_generation_is_on_the_disk_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss after a reset would give back the generation of before."""
    here, _ = engines_of(tmp_path)
    synced: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        fsync(fd)
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name.removesuffix(".new"))

    monkeypatch.setattr(os, "fsync", watched)
    here.advance()
    name = generation.file_name(NAMESPACE)
    assert synced == [name, name, "dp0"], "the group's, its own, and the name of that"
