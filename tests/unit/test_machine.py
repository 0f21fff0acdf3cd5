# SPDX-License-Identifier: Apache-2.0
"""Does the machine have what the settings ask for; and one directory has one owner."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnstore_vllm.config import StoreConfig
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.machine import LOCK_NAME, check_machine, check_unlocked, lock_directory

LOCK_AND_WAIT = """
import sys
from pathlib import Path
from attnstore_vllm.machine import lock_directory
lock_directory(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def settings(path: Path, **changes: object) -> StoreConfig:
    nvme = {"path": str(path), "capacity": changes.pop("capacity", "1MiB")}
    return StoreConfig.parse({"dram": "1MiB", "nvme": nvme} | changes)


def refused(config: StoreConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine(config)
    return str(caught.value)


@contextmanager
def another_process_owns(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LOCK_AND_WAIT, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        yield child
        child.kill()


def test_a_fit_machine_is_left_as_it_was(tmp_path: Path) -> None:
    check_machine(settings(tmp_path / "kv"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kv").mkdir()
    check_machine(settings(tmp_path / "kv", data_parallel_size=2))
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_missing_parent(tmp_path: Path) -> None:
    message = refused(settings(tmp_path / "absent" / "kv"))
    assert repr(str(tmp_path / "absent" / "kv")) in message
    assert repr(str(tmp_path / "absent")) in message
    assert "create it" in message


def test_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    assert "a link or a file" in refused(settings(tmp_path / "kv"))


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    assert "a link or a file" in refused(settings(tmp_path / "kv"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o500)
    assert "cannot be written to" in refused(settings(tmp_path / "kv"))


def test_more_shared_memory_than_there_is(tmp_path: Path) -> None:
    message = refused(settings(tmp_path / "kv", dram="1PiB"))
    assert "dram is 1024TiB" in message
    assert "--shm-size" in message


def test_more_disk_than_there_is(tmp_path: Path) -> None:
    message = refused(settings(tmp_path / "kv", capacity="1PiB"))
    assert "nvme.capacity is 1024TiB" in message
    assert "make room" in message


def test_what_an_earlier_run_holds_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slab").write_bytes(bytes(1 << 20))
    real = os.statvfs

    def full(path: object) -> os.statvfs_result:
        found = list(real(str(path)))
        if Path(str(path)) == tmp_path:
            found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    check_machine(settings(tmp_path, capacity="1MiB"))
    assert "nvme.capacity is 2MiB" in refused(settings(tmp_path, capacity="2MiB"))


def test_a_directory_of_another_process(tmp_path: Path) -> None:
    with another_process_owns(tmp_path / "kv") as child:
        message = refused(settings(tmp_path / "kv"))
        assert f"process {child.pid}" in message
        assert str(tmp_path / "kv") in message
        with pytest.raises(ConfigError, match=f"process {child.pid}"):
            lock_directory(tmp_path / "kv")
        assert (tmp_path / "kv" / LOCK_NAME).read_text() == f"{child.pid}\n"


def test_each_data_parallel_directory_is_checked(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    with another_process_owns(tmp_path / "kv" / "dp1"):
        assert "dp1" in refused(settings(tmp_path / "kv", data_parallel_size=2))


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    with another_process_owns(tmp_path / "kv") as child:
        child.kill()
        child.wait()
        os.close(lock_directory(tmp_path / "kv"))
    check_unlocked(tmp_path / "kv")


def test_the_lock_goes_with_its_descriptor(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path / "kv")
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        check_unlocked(tmp_path / "kv")
    os.close(lock)
    check_unlocked(tmp_path / "kv")


def test_the_directory_and_the_lock_are_for_their_owner_only(tmp_path: Path) -> None:
    os.close(lock_directory(tmp_path / "kv"))
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kv" / LOCK_NAME).stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        lock_directory(tmp_path / "absent" / "kv")


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / LOCK_NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"nvme\.path"):
        lock_directory(tmp_path / "kv")
    with pytest.raises(ConfigError, match=r"nvme\.path"):
        check_machine(settings(tmp_path / "kv"))
    assert not (tmp_path / "victim").exists()
