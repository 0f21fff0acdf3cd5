# SPDX-License-Identifier: Apache-2.0
"""A generation that could not be noted, and one that a power loss meets."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.own_files import make_directory
from attnstore_vllm.tiers.peers import generation
from attnstore_vllm.tiers.peers.generation import Generation
from attnstore_vllm.tiers.peers.make_peers import peers_of
from attnstore_vllm.tiers.peers.peers_io import PeersIo
from tests.helpers import (
    CHUNK_TOKENS,
    NAMESPACE,
    format_device,
    found_slab,
    new_slab,
    open_pool,
    slab_bytes,
)


class Failed:
    """A reset of NVMe."""

    is_over, succeeded = True, False


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
        assert here.value != before
    here.advance()
    assert here.value != before, "it would get KV of before its reset"
    sibling.advance()
    assert here.value == sibling.value


def test_a_reset_of_which_nothing_can_be_noted_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file can be opened. A restart takes the group's generation, which is of before."""
    here, _ = engines_of(tmp_path)

    def no_more(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(generation, "open_own", no_more)
        patch.setattr(generation, "replace_own", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            here.advance()


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


def test_a_generation_is_noted_once_nvme_has_nothing_of_before(tmp_path: Path) -> None:
    """A kill between the two would bring KV of before back, as that of after the reset."""
    dirs = [tmp_path / "dp0", tmp_path / "dp1"]
    for directory in dirs:
        directory.mkdir(mode=0o700)
    device, slab = MemoryDevice(slab_bytes(16)), new_slab(16)
    format_device(device, slab)
    pool = open_pool(8)
    more = peers_of(dirs[0], tmp_path, [dirs[1]], NAMESPACE, CHUNK_TOKENS, pool)
    store = open_store(pool, slab, device, more_tiers=more)
    noted = dirs[0] / generation.file_name(NAMESPACE)
    before, on_disk = noted.read_bytes(), found_slab(device.image).own[0].generation
    device.hold()
    with ThreadPoolExecutor(1) as other:
        reset = other.submit(store.reset)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and noted.read_bytes() == before:
            time.sleep(0.01)
        assert found_slab(device.image).own[0].generation == on_disk
        assert noted.read_bytes() == before
        device.release()
        assert reset.result()
    after = noted.read_bytes()
    assert after != before
    io = store.thread.tiers[1]
    assert isinstance(io, PeersIo)
    assert io.generation() == after
    io.context.disk_reset = Failed()
    with io.context.progress:
        given_up = io.reset()
        io.context.progress.wait_for(lambda: given_up.is_over, 10.0)
        assert not given_up.succeeded
    assert noted.read_bytes() == after != io.generation(), "a restart finds what is on NVMe"
    assert store.reset()
    assert after != noted.read_bytes() == io.generation()
    store.close()


def test_a_reset_that_is_noted_late_undoes_no_later_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waits for the group's file. NVMe's second fails meanwhile: KV of before stays."""
    monkeypatch.setattr(generation, "LOCK_TRIES", 5000)
    is_noting = threading.Event()

    def noting(path: Path) -> None:
        is_noting.set()
        make_directory(path)

    dirs = [tmp_path / "dp0", tmp_path / "dp1"]
    for directory in dirs:
        directory.mkdir(mode=0o700)
    device, slab = MemoryDevice(slab_bytes(16)), new_slab(16)
    format_device(device, slab)
    pool = open_pool(8)
    more = peers_of(dirs[0], tmp_path, [dirs[1]], NAMESPACE, CHUNK_TOKENS, pool)
    store = open_store(pool, slab, device, more_tiers=more)
    io = store.thread.tiers[1]
    assert isinstance(io, PeersIo)
    monkeypatch.setattr(generation, "make_directory", noting)
    with (tmp_path / generation.file_name(NAMESPACE)).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with io.context.progress:
            first = io.reset()
        assert is_noting.wait(10.0)
        with io.context.progress:
            io.context.disk_reset = Failed()
            second = io.reset()
            io.context.progress.wait_for(lambda: second.is_over, 10.0)
            assert not second.succeeded
    with io.context.progress:
        io.context.progress.wait_for(lambda: first.is_over, 10.0)
        assert first.succeeded
    assert io.generation() != (dirs[0] / generation.file_name(NAMESPACE)).read_bytes()
    store.close()
