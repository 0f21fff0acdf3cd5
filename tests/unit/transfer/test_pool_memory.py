# SPDX-License-Identifier: Apache-2.0
"""The pool's memory: huge pages where a tmpfs allows them, and the node of the GPUs."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import secrets
import subprocess
import sys
from pathlib import Path
from threading import Barrier

import pytest

from attnstore_vllm.transfer import pool_memory
from attnstore_vllm.transfer.pool import SLOTS_AT, SharedPool
from attnstore_vllm.transfer.pool_memory import (
    HugePages,
    NumaMode,
    NumaPolicy,
    gpu_numa_node,
    huge_pages,
    numa_policy,
    parse_list,
)

NEVER = "always within_size advise [never] deny force"
SIZE = 8 << 20


# ---- huge pages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shmem_enabled", "mount_options", "expected"),
    [
        (NEVER, "rw,size=65536k", HugePages.NEVER),
        (NEVER, "", HugePages.NEVER),
        (NEVER, "rw,size=65536k,huge=advise", HugePages.ADVISE),
        (NEVER, "rw,huge=within_size,inode64", HugePages.ALWAYS),
        (NEVER, "rw,huge=always", HugePages.ALWAYS),
        (NEVER, "rw,huge=never", HugePages.NEVER),
        # The kernel's internal mount, which is another one.
        ("[always] within_size advise never deny force", "rw", HugePages.NEVER),
        ("always within_size [advise] never deny force", "rw", HugePages.NEVER),
        ("always within_size advise never [deny] force", "rw,huge=always", HugePages.NEVER),
        ("always within_size advise never deny [force]", "rw", HugePages.ALWAYS),
    ],
)
def test_the_mount_decides(shmem_enabled: str, mount_options: str, expected: HugePages) -> None:
    assert huge_pages(shmem_enabled, mount_options) is expected


POOL_IN_A_MOUNT = """
import sys
from pathlib import Path
from threading import Barrier
from attnstore_vllm.transfer import pool as pool_module
pool_module.SHM_DIR = Path(sys.argv[1])
members = [
    pool_module.SharedPool("attnstore-x", 64, 1 << 20, num_ranks=1, member=m) for m in (0, 1)
]
for member in members:  # what is allocated is mapped when it is first read
    assert not any(bytes(member.slot(slot)[:1])[0] for slot in range(64))
mapped, inside = 0, False
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):
        inside = "attnstore-x" in line
    elif inside and words[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
        mapped += int(words[1])
print(mapped)
"""


@pytest.mark.parametrize("allowed", ["never", "advise", "within_size", "always"])
def test_pools_in_a_tmpfs_that_allows_huge_pages_have_them(tmp_path: Path, allowed: str) -> None:
    """In a mount of the test's own, seen by nobody else."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not enabled.exists() or {"[deny]", "[force]"} & set(enabled.read_text().split()):
        pytest.skip("the kernel does not leave it to the mount")
    (tmp_path / "shm").mkdir()
    script = (
        f"mount -t tmpfs -o size=80m,huge={allowed} none {tmp_path}/shm || exit 77; "
        f'exec "{sys.executable}" -c "$0" {tmp_path}/shm'
    )
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    try:
        found = subprocess.run(
            [*command, POOL_IN_A_MOUNT], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if found.returncode in (1, 77) and "Traceback" not in found.stderr:
        pytest.skip(f"no tmpfs with huge={allowed} here: {found.stderr.strip()}")
    assert found.returncode == 0, found.stderr
    if allowed == "never":
        assert int(found.stdout) == 0
    else:  # of both members; a machine without free huge pages has fewer
        assert int(found.stdout) > 0


def test_files_are_allocated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2, timeout=30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def meet(*_: object) -> None:
        both.wait()

    monkeypatch.setattr(pool_memory, "numa_policy", meet)
    fds = [os.memfd_create("attnstore-test") for _ in range(2)]
    pool_memory.allocate([(fd, SIZE, ()) for fd in fds])
    assert [os.fstat(fd).st_size for fd in fds] == [SIZE, SIZE]
    for fd in fds:
        os.close(fd)


# ---- NUMA ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes_with_memory", "gpu_nodes", "expected"),
    [
        ((0, 1), (1,), NumaPolicy(NumaMode.PREFERRED, (1,))),
        ((0, 1), (1, 1, 1), NumaPolicy(NumaMode.PREFERRED, (1,))),
        ((0, 1), (1, 0, 0, 1), NumaPolicy(NumaMode.INTERLEAVE, (0, 1))),
        ((0, 1, 2, 3), (3, 1), NumaPolicy(NumaMode.INTERLEAVE, (1, 3))),
        ((0, 1), (1, 7), NumaPolicy(NumaMode.PREFERRED, (1,))),  # a node without memory
        ((0, 1), (7,), None),
        ((0, 1), (), None),
        ((0, 1), (0, -1), None),
        ((0,), (0,), None),
        ((), (0,), None),
        ((0, 5000), (5000,), None),
    ],
)
def test_memory_is_near_the_gpus(
    nodes_with_memory: tuple[int, ...], gpu_nodes: tuple[int, ...], expected: NumaPolicy | None
) -> None:
    assert numa_policy(nodes_with_memory, gpu_nodes) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0\n", {0}), ("0-1,4\n", {0, 1, 4}), ("\n", set()), ("2-3", {2, 3})],
)
def test_lists_of_the_kernel(text: str, expected: set[int]) -> None:
    assert parse_list(text) == expected


def test_the_node_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "_PCI_DEVICES", tmp_path)
    for name, text in (("0000:3b:00.0", "1\n"), ("0001:af:00.1", "0\n"), ("0000:01:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert gpu_numa_node("0000:3b:00.0") == 1
    assert gpu_numa_node("00000000:3B:00.0") == 1
    assert gpu_numa_node("0001:AF:00.1") == 0
    for unknown in ("0000:01:00.0", "0000:02:00.0", "", "../../0000:3b:00.0", "3b:00.0"):
        assert gpu_numa_node(unknown) is None


needs_numa = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists() or platform.machine() not in ("x86_64", "aarch64"),
    reason="a kernel without NUMA",
)


def policy_of(address: int) -> str:
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *_ = line.split()
        if int(start, 16) == address:
            return policy
    return ""


@needs_numa
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (NumaPolicy(NumaMode.PREFERRED, (0,)), "prefer:0"),
        (NumaPolicy(NumaMode.INTERLEAVE, (0,)), "interleave:0"),
        (None, "default"),
    ],
)
def test_the_policy_is_that_of_the_file_for_every_process(
    policy: NumaPolicy | None, expected: str
) -> None:
    fd = os.memfd_create("attnstore-test")
    os.ftruncate(fd, SIZE)
    first, second = mmap.mmap(fd, SIZE), mmap.mmap(fd, SIZE)
    told = pool_memory._bind(first, policy)
    if "Operation not permitted" in told:
        pytest.skip("mbind is forbidden here, as containers do")
    assert told == ("" if policy is None else f", {policy.mode.name.lower()} on NUMA node 0")
    address = ctypes.addressof(ctypes.c_char.from_buffer(second))
    assert policy_of(address).rstrip(":") == expected
    first.close()
    second.close()
    os.close(fd)


@needs_numa
@pytest.mark.parametrize(
    ("near", "logged", "expected"),
    [
        ([0], ", preferred on NUMA node 0", "prefer:0"),
        ([], "", "default"),
        # A node that is not there costs nothing but a line in the log.
        ([1000], ", not near the GPUs (NUMA node 1000): mbind says", "default"),
    ],
)
def test_who_creates_the_region_takes_its_memory_near_the_gpus(
    near: list[int],
    logged: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pool_memory, "_nodes_with_memory", lambda: (0, 1000))
    monkeypatch.setattr(logging.getLogger("attnstore_vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "attnstore_vllm")
    name = f"attnstore-test-{secrets.token_hex(8)}"
    pools = [SharedPool(name, 2, 8192, num_ranks=1, member=m, near=near) for m in (0, 1)]
    pools[0].slot(1)[:] = b"x" * 8192
    assert bytes(pools[1].slot(1)) == b"x" * 8192
    policy = policy_of(pools[1].address - SLOTS_AT)
    for pool in pools:
        pool.close()
    (told,) = [r.message for r in caplog.records if "allocated" in r.message]
    if "Operation not permitted" in told:
        pytest.skip("mbind is forbidden here, as containers do")
    assert logged in told
    assert policy.rstrip(":") == expected
