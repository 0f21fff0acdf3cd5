# SPDX-License-Identifier: Apache-2.0
"""Does the machine have what the settings ask for; and one directory has one owner.

It is long since each thing that a machine may lack has its case.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnstore_vllm import _native_cuda, preflight
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.errors import ConfigError, MachineError
from attnstore_vllm.preflight import (
    LOCK_NAME,
    SLAB_NAME,
    SharedMemory,
    _group_limit,
    check_machine,
    check_unlocked,
    driver_counts_locked_memory,
    lacks_locked_memory,
    lacks_memory,
    lock_directory,
    owner_of,
    problems,
    shared_memory,
)
from attnstore_vllm.tiers.nvme.node_disk import FILE_NAME
from attnstore_vllm.transfer.region import PREFIX

LOCK_AND_WAIT = """
import sys
from pathlib import Path
from attnstore_vllm.preflight import lock_directory
lock_directory(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def settings(path: Path | list[Path], **changes: object) -> StoreConfig:
    paths = list(map(str, path)) if isinstance(path, list) else str(path)
    nvme = {"path": paths, "capacity": changes.pop("capacity", "1MiB")}
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


def test_a_trace_in_no_directory(tmp_path: Path) -> None:
    check_machine(settings(tmp_path / "kv", trace={"path": str(tmp_path / "trace")}))
    missing = str(tmp_path / "absent" / "trace")
    assert "trace.path is " in refused(settings(tmp_path / "kv", trace={"path": missing}))
    (tmp_path / "trace-dp1").touch()
    two = {"trace": {"path": str(tmp_path / "trace")}, "data_parallel_size": 2}
    assert "trace-dp1" in refused(settings(tmp_path / "kv", **two))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o500)
    assert "cannot be written to" in refused(settings(tmp_path / "kv"))


def test_more_shared_memory_than_there_is(tmp_path: Path) -> None:
    message = refused(settings(tmp_path / "kv", dram="1PiB"))
    assert "dram is 1PiB" in message
    assert "--shm-size" in message


GIB = 1 << 30


def test_the_message_has_the_size_that_holds_what_is_there_too() -> None:
    shared = SharedMemory(total_bytes=24 * GIB, free_bytes=20 * GIB)
    assert lacks_memory(20 * GIB, shared, 20 * GIB) is None
    for asked, size in ((20 * GIB + 1, 25), (30 * GIB, 34)):
        message = lacks_memory(asked, shared, 1 << 62)
        assert message is not None
        assert "has 20GiB free of 24GiB" in message
        assert f"mount -o remount,size={size}g /dev/shm" in message
        assert f"docker run --shm-size={size}g" in message
        assert "medium: Memory" in message
        assert f"sizeLimit: {size}Gi" in message


def test_a_container_that_may_use_less_than_its_shared_memory_holds() -> None:
    shared = SharedMemory(total_bytes=24 * GIB, free_bytes=24 * GIB)
    message = lacks_memory(16 * GIB, shared, 8 * GIB)
    assert message is not None
    assert "has 8GiB of memory" in message
    assert "docker run --memory" in message


def test_shared_memory_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: endless)
    assert lacks_memory(1 << 50, shared_memory(Path("/dev/shm")), 1 << 62) is None


def test_the_limits_of_a_control_group_and_of_those_that_it_is_in(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for directory, limit in (("", "max"), ("a", "4000"), ("a/b", "9000"), ("memory/x", "7")):
        (root / directory).mkdir(parents=True, exist_ok=True)
        (root / directory / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.max").write_text("1\n")  # no group: outside of what is mounted
    (root / "memory" / "x" / "memory.limit_in_bytes").write_text("3000\n")
    assert _group_limit(root, "0::/a/b") == 4000
    assert _group_limit(root, "0::/a") == 4000
    assert _group_limit(root, "5:cpu,memory:/x") == 3000
    for line in ("0::/", "0::/of/the/host/only", "4:cpu:/a"):
        assert _group_limit(root, line) == 1 << 62
    (root / "memory.max").write_text("5000\n")  # in a container: the container's own
    assert _group_limit(root, "0::/of/the/host/only") == 5000


def test_data_parallel_engines_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "shared_memory", lambda path: SharedMemory(GIB, GIB))
    config = settings(tmp_path / "kv", dram="4GiB", data_parallel_size=8)
    assert "dram is 4GiB, but shared memory" in refused(config)
    with pytest.raises(ConfigError, match=r"dram is 4GiB, of which 1\.5GiB here, but"):
        check_machine(config, [0, 1, 2])
    check_machine(config, [6, 7])
    check_machine(config, [])


def test_who_only_looks_counts_as_free_what_killed_starts_left_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "shm" / f"{PREFIX}dead"
    left.parent.mkdir()
    left.write_bytes(b"x" * (2 << 20))
    monkeypatch.setattr(preflight, "SHM_DIR", left.parent)
    monkeypatch.setattr(preflight, "shared_memory", lambda path: SharedMemory(4 << 20, 1 << 20))
    config = settings(tmp_path / "kv", dram="2MiB")
    assert list(problems(config)) == []
    assert left.exists()
    with pytest.raises(MachineError, match="dram is 2MiB"):  # it is gone, and not counted twice
        check_machine(config)
    assert not left.exists()


def test_an_engine_that_is_started_alone_leaves_the_others_directories(tmp_path: Path) -> None:
    """As behind a load balancer, each with --data-parallel-rank."""
    (tmp_path / "kv").mkdir()
    config = settings(tmp_path / "kv", data_parallel_size=2)
    with another_process_owns(tmp_path / "kv" / "dp0"):
        check_machine(config, [1])
        with pytest.raises(ConfigError, match="dp0"):
            check_machine(config, [0])


# ---- locked memory -------------------------------------------------------------------------


def test_a_pool_beyond_the_limit_on_locked_memory_names_what_raises_it() -> None:
    message = lacks_locked_memory(64 * GIB, 8 << 20, lambda: True)
    assert message is not None
    assert "locked memory is 8MiB" in message
    for remedy in ("ulimit -l unlimited", "--ulimit memlock=-1", "LimitMEMLOCK=infinity"):
        assert remedy in message


@pytest.mark.parametrize("limit", [-1, 64 * GIB, 65 * GIB])
def test_a_driver_is_not_asked_where_the_limit_suffices(limit: int) -> None:
    def ask() -> bool:
        pytest.fail("asked")

    assert lacks_locked_memory(64 * GIB, limit, ask) is None


def test_a_driver_that_does_not_count_is_no_reason_to_refuse() -> None:
    assert lacks_locked_memory(64 * GIB, 8 << 20, lambda: False) is None


DRIVER = """
#include <stddef.h>
#include <sys/resource.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int number) { *device = 7; return number; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &cuInit; return device - 7; }
int cuCtxSetCurrent(void *context) { return context != &cuInit; }
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
  struct rlimit limit;
  getrlimit(RLIMIT_MEMLOCK, &limit);
  *(volatile char *)address = 1;
  return COUNTS && limit.rlim_cur <= 65536 && bytes > limit.rlim_cur;
}
"""


@pytest.mark.parametrize(
    ("init", "counts", "expected"), [(0, 1, True), (0, 0, False), (1, 1, False)]
)
def test_the_driver_is_asked_in_a_process_of_its_own(
    tmp_path: Path, init: int, counts: int, expected: bool
) -> None:
    """A driver that keeps to the limit, one that does not, and one without a GPU."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler here")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    define = [f"-DINIT={init}", f"-DCOUNTS={counts}"]
    command = [compiler, "-shared", "-fPIC", *define, "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    assert driver_counts_locked_memory(str(library)) is expected


def test_without_a_driver_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not driver_counts_locked_memory(str(tmp_path / "libcuda.so.1"))
    monkeypatch.setattr(preflight, "_PROBE_TIMEOUT_S", 1e-3)
    assert not driver_counts_locked_memory(str(tmp_path / "libcuda.so.1"))


def test_a_gpu_without_its_driver_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig.parse(
        {"dram": "2MiB", "nvme": {"path": str(tmp_path), "capacity": "1MiB"}}
    )
    monkeypatch.setattr(_native_cuda, "why_no_driver", lambda: "NVIDIA's driver is not here")
    check_machine(config)
    with pytest.raises(ConfigError, match="cannot copy from this GPU: NVIDIA's driver is not here"):
        check_machine(config, pins_memory=True)


def test_memory_is_counted_for_each_process_where_it_is_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native_cuda, "why_no_driver", lambda: "")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    monkeypatch.setattr(preflight, "driver_counts_locked_memory", lambda: True)
    config = settings(tmp_path / "kv", dram="2MiB")
    check_machine(config)
    with pytest.raises(ConfigError, match="dram is 2MiB, but the limit on locked memory is 1MiB"):
        check_machine(config, pins_memory=True)
    shared = settings(tmp_path / "kv", dram="2MiB", data_parallel_size=2)
    check_machine(shared, pins_memory=True)
    check_machine(shared, [], pins_memory=True)


def test_more_disk_than_there_is(tmp_path: Path) -> None:
    message = refused(settings(tmp_path / "kv", capacity="1PiB"))
    assert "nvme.capacity is 1PiB" in message
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


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Directories on two file systems, which have 8 and 6 MiB free."""
    with tempfile.TemporaryDirectory(dir=preflight.SHM_DIR) as other:
        found = [tmp_path, Path(other)]
        if len({each.stat().st_dev for each in found}) == 1:
            pytest.skip("one file system")
        real = os.statvfs

        def small(path: object) -> os.statvfs_result:
            stat = list(real(str(path)))
            for each, free in zip(found, (8, 6), strict=True):
                if Path(str(path)).is_relative_to(each):
                    stat[1], stat[4] = 1 << 20, free  # f_frsize, f_bavail
            return os.statvfs_result(stat)

        monkeypatch.setattr(os, "statvfs", small)
        yield found


def both(disks: list[Path], capacity: str, engines: int) -> StoreConfig:
    paths = [disk / "kv" for disk in disks]
    return settings(paths, capacity=capacity, data_parallel_size=engines, dram="4MiB")


def test_each_file_system_must_hold_its_own_engines(disks: list[Path]) -> None:
    check_machine(both(disks, "12MiB", 2))
    check_machine(both(disks, "12MiB", 3))  # 8 and 4
    here, there = (repr(str(disk / "kv")) for disk in disks)
    for capacity, part, engines, named in (
        ("18MiB", "9MiB", 2, {here: 8, there: 6}),
        ("14MiB", "7MiB", 2, {there: 6}),
        ("15MiB", "10MiB", 3, {here: 8}),  # the other's is half of that
    ):
        found = list(map(str, problems(both(disks, capacity, engines))))
        assert found == [
            f"nvme.capacity is {capacity}, of which {part} here, but {path} has {free}MiB (free, "
            "or held by an earlier run); ask for less, or make room"
            for path, free in named.items()
        ]


def test_engines_on_one_file_system_must_fit_together(disks: list[Path]) -> None:
    paths = [disks[0] / "a", disks[0] / "b"]
    check_machine(settings(paths, capacity="8MiB", data_parallel_size=2))
    (found,) = problems(settings(paths, capacity="9MiB", data_parallel_size=2))
    assert str(found).startswith(
        f"nvme.capacity is 9MiB, but {str(paths[0])!r} and {str(paths[1])!r} (one file system) has"
    )


@pytest.mark.parametrize("name", [SLAB_NAME, FILE_NAME])
def test_what_earlier_runs_hold_counts_on_its_own_file_system(disks: list[Path], name: str) -> None:
    config = both(disks, "14MiB", 2)
    assert str(disks[1]) in refused(config)
    (disks[1] / "kv" / "dp1").mkdir(parents=True)
    file = disks[1] / "kv" / "dp1" / name
    file.write_bytes(bytes(1 << 20))
    check_machine(config)
    file.unlink()
    assert str(disks[1]) in refused(config)


def test_every_path_is_checked_by_itself(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "absent" / "b", tmp_path / "c"]
    (tmp_path / "c").touch()
    config = settings(paths, capacity="1PiB", data_parallel_size=4)
    found = list(map(str, problems(config)))
    assert repr(str(paths[1])) in found[0] and "its parent" in found[0]
    assert repr(str(paths[2])) in found[1] and "a link or a file" in found[1]
    capacity = "nvme.capacity is 1PiB, of which 768TiB here, but "
    assert found[2].startswith(capacity + repr(str(paths[0])))
    assert str(paths[1]) not in found[2]


def test_an_engine_that_is_started_alone_needs_its_own_path(tmp_path: Path) -> None:
    config = settings([tmp_path / "a", tmp_path / "absent" / "b"], data_parallel_size=2)
    check_machine(config, [0])
    with pytest.raises(ConfigError, match="absent"):
        check_machine(config, [1])


def test_the_directories_of_all_paths_are_checked_for_their_owners(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    config = settings(paths, data_parallel_size=2)
    with another_process_owns(tmp_path / "b" / "dp1"):
        assert repr(str(tmp_path / "b" / "dp1")) in refused(config)
        check_machine(config, [0])
    with another_process_owns(tmp_path / "a" / "dp1"):  # left over from one path for both
        check_machine(config)


def test_more_paths_than_engines_are_refused_before_a_start(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    assert "names 2 directories, but data_parallel_size is 1" in refused(settings(paths))


def test_a_directory_of_another_process(tmp_path: Path) -> None:
    with another_process_owns(tmp_path / "kv") as child:
        message = refused(settings(tmp_path / "kv"))
        assert f"process {child.pid}" in message
        assert str(tmp_path / "kv") in message
        with pytest.raises(ConfigError, match=f"process {child.pid}"):
            lock_directory(tmp_path / "kv")
        assert (tmp_path / "kv" / LOCK_NAME).read_text() == f"{child.pid} 0 {platform.node()}\n"


def test_the_refusal_says_whose_the_directory_is() -> None:
    """Numbers of other machines and containers name no process of ours."""
    me, parent, here, nobody = os.getpid(), os.getppid(), platform.node(), 2**22 + 1
    for said, owner, ends_itself in (
        (f"{me} {parent} {here}\n", f"process {me}", False),
        (f"{me} 0 {here}\n", f"process {me}", False),
        (f"{me} {nobody} {here}\n", f"process {me}, whose parent {nobody} is gone", True),
        (f"{me} {nobody} elsewhere\n", f"process {me} on 'elsewhere'", False),
        (f"{nobody} {nobody} {here}\n", f"process {nobody}", False),
        (f"{me}\n", f"process {me}", False),  # of an earlier build
        ("\x1b[2J 1", "process unknown", False),
        ("", "process unknown", False),
    ):
        found, advice = owner_of(said)
        assert found == owner
        assert ("ends within 5 s" in advice) == ends_itself


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
