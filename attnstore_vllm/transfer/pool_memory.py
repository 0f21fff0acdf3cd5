# SPDX-License-Identifier: Apache-2.0
"""Memory that a new region of the pool gets: huge pages where they are allowed, near the GPUs.

Only the creator allocates, several files at a time. The order is what tmpfs asks for:

    ftruncate           `huge=within_size` looks at the file's size
    mbind               on a shared mapping of tmpfs this is the policy of the file itself: it
                        holds for fallocate, and for what other processes touch first
    madvise, populate   with `huge=advise` only a fault in a mapping that was advised gets a huge
                        page; fallocate has no mapping and never does. Other mappings, of other
                        processes too, then map the huge page that is there
    fallocate           the rest, or all: with `huge=always` or `within_size` these are huge
                        pages already. What is left out now would end an engine by SIGBUS later

For files in a mounted tmpfs the mount's own `huge=` decides. shmem_enabled is the setting of the
kernel's internal mount; of its values only `deny` and `force` hold for the others too.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from attnstore_vllm.config.values import format_size

logger = logging.getLogger(__name__)

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NODES_WITH_MEMORY = Path("/sys/devices/system/node/has_memory")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PCI_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not among the names of the mmap module
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NODE_BITS = 1024
"""Nodes that a mask has room for, as many as Linux can be built with."""
_WORTH_SAYING_BYTES = 16 << 30
"""A pool of this size takes seconds, which is announced."""


class HugePages(Enum):
    """Huge pages that a mounted tmpfs allows; the value is for the log."""

    NEVER = "small pages (mount -o remount,huge=advise /dev/shm allows huge ones)"
    ADVISE = "huge pages where there are free ones (huge=advise)"
    ALWAYS = "huge pages where there are free ones (huge=always or within_size)"


class NumaMode(Enum):
    """The kernel's numbers (linux/mempolicy.h)."""

    PREFERRED = 1
    INTERLEAVE = 3


@dataclass(frozen=True, slots=True)
class NumaPolicy:
    mode: NumaMode
    nodes: tuple[int, ...]


def allocate(files: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """Back all of the new, empty files with memory, on as many threads as there are processors.
    What was done is logged.

    Args:
        files: the descriptor and the bytes of each, and the NUMA nodes of the GPUs that it should
            be near, none if they are not known; all in one tmpfs.
    Raises: OSError if there is not so much. Without huge pages or NUMA it goes on.
    """
    size_bytes = sum(num_bytes for _, num_bytes, _ in files)
    size = format_size(size_bytes)
    stat = os.fstatvfs(files[0][0])
    if stat.f_blocks and stat.f_bavail * stat.f_frsize < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    num_threads = min(len(files), len(os.sched_getaffinity(0)))
    if size_bytes >= _WORTH_SAYING_BYTES:
        logger.info("allocating %s of shared memory on %d threads", size, num_threads)
    allowed = _huge_pages_of(files[0][0])
    nodes = _nodes_with_memory()

    def back(file: tuple[int, int, Sequence[int]]) -> str:
        fd, num_bytes, near = file
        return _back(fd, num_bytes, allowed, numa_policy(nodes, near))

    with ThreadPoolExecutor(num_threads, "attnstore-allocate") as threads:
        told = "".join(dict.fromkeys(threads.map(back, files)))
    logger.info("allocated %s of shared memory: %s%s", size, allowed.value, told)


def _back(fd: int, num_bytes: int, allowed: HugePages, policy: NumaPolicy | None) -> str:
    """Back one file with memory. Returns what to log of its NUMA node."""
    os.ftruncate(fd, num_bytes)
    with mmap.mmap(fd, num_bytes) as mapping:
        near_to = _bind(mapping, policy)
        if allowed is HugePages.ADVISE:
            _madvise(mapping, mmap.MADV_HUGEPAGE)
            # Fails where the kernel is older, or memory ends: fallocate sees to both.
            _madvise(mapping, _MADV_POPULATE_WRITE)
    os.posix_fallocate(fd, 0, num_bytes)
    return near_to


def _madvise(mapping: mmap.mmap, advice: int) -> None:
    # mmap.madvise would hold the GIL, for as long as it takes to clear all of the memory.
    error = _libc("madvise", ctypes.c_void_p(_address(mapping)), len(mapping), advice)
    if error:
        logger.debug("madvise(%d) of the pool: %s", advice, os.strerror(error))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _libc(function: str, *arguments: object) -> int:
    """Call it; returns errno, or 0 if it did what it should. Integers go as longs."""
    libc = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    called = getattr(libc, function)
    called.restype = ctypes.c_long
    return 0 if called(*given) == 0 else ctypes.get_errno()


# ---- huge pages ----------------------------------------------------------------------------


def _huge_pages_of(fd: int) -> HugePages:
    """Huge pages that the kernel allows files of the tmpfs that `fd` is in."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        enabled = _SHMEM_ENABLED.read_text()
    except OSError:  # a kernel without huge pages for shared memory
        return HugePages.NEVER
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    options = [line.split()[-1] for line in mounts if line.split()[2] == number]
    return huge_pages(enabled, options[-1] if options else "")


def huge_pages(shmem_enabled: str, mount_options: str) -> HugePages:
    """Huge pages that the kernel allows files of a tmpfs.

    Args:
        shmem_enabled: what the kernel's file holds, e.g. "always advise [never] deny force".
        mount_options: of the tmpfs, e.g. "rw,size=64k,huge=advise".
    """
    if "[deny]" in shmem_enabled:
        return HugePages.NEVER
    if "[force]" in shmem_enabled:
        return HugePages.ALWAYS
    for option in mount_options.split(","):
        if option in ("huge=always", "huge=within_size"):
            return HugePages.ALWAYS
        if option == "huge=advise":
            return HugePages.ADVISE
    return HugePages.NEVER


# ---- NUMA ----------------------------------------------------------------------------------


def gpu_numa_node(pci_bus_id: str) -> int | None:
    """The NUMA node of a GPU, None if the machine does not say (as most with one node).

    Args:
        pci_bus_id: as CUDA and NVML write it, "0000:3b:00.0" or "00000000:3B:00.0".
    """
    match = _PCI_BUS_ID.fullmatch(pci_bus_id.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    name = f"{int(domain, 16):04x}:{bus}:{device}.{function}"
    try:
        node = int((_PCI_DEVICES / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def numa_policy(nodes_with_memory: Sequence[int], gpu_nodes: Sequence[int]) -> NumaPolicy | None:
    """Where memory of the pool should be; None: wherever the kernel puts it.

    On the node of its GPUs, or over their nodes where ranks share a part. Neither is strict: where
    a node is full, its neighbours help out.

    Args:
        nodes_with_memory: those that this process may take memory from.
        gpu_nodes: of the GPUs that copy from it; negative: not known.
    """
    if len(nodes_with_memory) < 2 or not gpu_nodes or min(gpu_nodes) < 0:
        return None
    nodes = tuple(sorted(set(gpu_nodes) & set(nodes_with_memory)))
    if not nodes or nodes[-1] >= _NODE_BITS:
        return None
    return NumaPolicy(NumaMode.PREFERRED if len(nodes) == 1 else NumaMode.INTERLEAVE, nodes)


def _bind(mapping: mmap.mmap, policy: NumaPolicy | None) -> str:
    """Set the policy of the whole file. Returns what to log."""
    number = _SYS_MBIND.get(platform.machine())
    if policy is None or number is None:
        return ""
    mask = (ctypes.c_uint64 * (_NODE_BITS // 64))()
    for node in policy.nodes:
        mask[node // 64] |= 1 << node % 64
    # The kernel takes one bit less than it is told of. No flags: nothing is there to be moved.
    error = _libc(
        "syscall",
        number,
        ctypes.c_void_p(_address(mapping)),
        len(mapping),
        policy.mode.value,
        mask,
        _NODE_BITS + 1,
        0,
    )
    nodes = ", ".join(map(str, policy.nodes))
    if error:
        return f", not near the GPUs (NUMA node {nodes}): mbind says {os.strerror(error)}"
    return f", {policy.mode.name.lower()} on NUMA node {nodes}"


def _nodes_with_memory() -> tuple[int, ...]:
    """Those that this process may take memory from."""
    try:
        nodes = parse_list(_NODES_WITH_MEMORY.read_text())
        status = Path("/proc/self/status").read_text()
    except OSError:  # a kernel without NUMA
        return ()
    for line in status.splitlines():
        if line.startswith("Mems_allowed_list:"):
            nodes &= parse_list(line.partition(":")[2])
    return tuple(sorted(nodes))


def parse_list(text: str) -> set[int]:
    """The kernel's way to write numbers, e.g. "0-1,4"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
