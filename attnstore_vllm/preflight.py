# SPDX-License-Identifier: Apache-2.0
"""Does the machine have what the settings ask for? Asked before the model loads.

It is long since each thing that a machine may lack has its check and its message here.

These checks take nothing: the pool and the slab file are allocated, and the directory is
locked, by the engine itself, which checks again. A start first gives back what killed ones left
in shared memory; who only looks (`attnstore doctor`) counts that as free, and leaves it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from attnstore_vllm.config.settings import NvmeConfig, StoreConfig
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError, DeviceError, MachineError, UnsupportedError
from attnstore_vllm.own_files import (
    NotOursError,
    check_directory,
    check_parent,
    make_directory,
    open_own,
)
from attnstore_vllm.plain_text import printable
from attnstore_vllm.tiers.nvme.node_disk import FILE_NAME as NODE_NAME
from attnstore_vllm.transfer import region
from attnstore_vllm.transfer.cuda_kernels import native_module

logger = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
LOCK_NAME = "lock"
SLAB_NAME = "slab"
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


TESTED_VLLM = ("0.30.0", "0.31.0", "0.32.0")


def wrong_vllm(error: ImportError) -> UnsupportedError:
    """The error of a start on a vLLM that lacks what the connector imports."""
    try:
        found = f"vLLM {importlib.metadata.version('vllm')}"
    except importlib.metadata.PackageNotFoundError:
        found = "this vLLM"
    return UnsupportedError(
        f"AttnStore cannot be used with {found}: {error}. It works with {', '.join(TESTED_VLLM)}; "
        "install one of them, or start vLLM without --kv-transfer-config"
    )


def check_machine(
    config: StoreConfig, ranks: Sequence[int] | None = None, *, pins_memory: bool = False
) -> None:
    """Raise ConfigError for the first setting that this machine cannot meet. For starts alone: it
    removes what killed ones left in shared memory.

    Args: as problems() has them.
    """
    with contextlib.suppress(OSError):  # problems() says what is wrong there
        region.sweep(SHM_DIR)  # a killed start's pool would count as used
    for problem in problems(config, ranks, pins_memory=pins_memory):
        raise problem


def problems(
    config: StoreConfig, ranks: Sequence[int] | None = None, *, pins_memory: bool = False
) -> Iterator[ConfigError]:
    """Every setting that this machine cannot meet; what depends on a directory only if it is there.
    Nothing is changed.

    Args:
        ranks: the data-parallel engines that this start begins here; None: all of them.
        pins_memory: whether the pool will be page-locked for CUDA.
    """
    try:
        engines = _engines(config, ranks)
        disks = _by_file_system(engines)
    except ConfigError as error:
        yield error
        return
    except OSError as error:
        yield MachineError(f"nvme.path cannot be looked at: {error}")
        return
    parts = [engine.nvme for engine in engines]
    refused = set[Path]()
    for path in dict.fromkeys(part.named_path for part in parts):
        for failure in _failures(partial(_check_directory, "nvme.path", path)):
            refused.add(path)
            yield failure
    # Of a directory that is refused nothing more is said: all else would fail for the same reason.
    fine = [part for part in parts if part.named_path not in refused]
    for check in (
        *(
            partial(_check_directory, "trace.path", engine.trace.path)
            for engine in engines
            if engine.trace is not None
        ),
        *([_check_driver] if pins_memory else ()),
        partial(_check_memory, config, engines, pins_memory=pins_memory),
        *(
            partial(_check_disk, config, those)
            for those in disks
            if any(part in fine for part in those)
        ),
        *(partial(_check_locks, part) for part in fine),
    ):
        yield from _failures(check)


def _failures(check: Callable[[], None]) -> Iterator[ConfigError]:
    try:
        check()
    except ConfigError as error:
        yield error
    except OSError as error:
        yield MachineError(f"this machine cannot be looked at: {error}")


def _engines(config: StoreConfig, ranks: Sequence[int] | None) -> list[StoreConfig]:
    if config.data_parallel_size == 1:
        return [config.share(None)]
    here = range(config.data_parallel_size) if ranks is None else ranks
    return [config.share(rank) for rank in here]


def _check_driver() -> None:
    """Ask before the model is loaded; CudaEngine does only after it."""
    try:
        native_module()
    except UnsupportedError as error:
        raise MachineError(f"the store cannot copy from this GPU: {error}") from error


def _check_memory(
    config: StoreConfig, engines: Sequence[StoreConfig], *, pins_memory: bool
) -> None:
    dram_bytes = sum(engine.dram_bytes for engine in engines)
    left = sum(region.dead(SHM_DIR).values())  # a start gives that back
    shared = shared_memory(SHM_DIR)
    shared = replace(shared, free_bytes=shared.free_bytes + left)
    missing = lacks_memory(dram_bytes, shared, memory_available(left))
    if missing is None and pins_memory and engines:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        most = max(engine.dram_bytes for engine in engines)  # the limit is each process's own
        missing = lacks_locked_memory(most, limit, driver_counts_locked_memory)
    if missing is not None:
        raise MachineError(f"dram is {_part(config.dram_bytes, dram_bytes)}, but {missing}")


def _part(asked: int, here: int) -> str:
    """The setting, and what of it is asked of this machine. (Shares are rounded down.)"""
    share = f", of which {format_size(here)} here" if here < 0.999 * asked else ""
    return f"{format_size(asked)}{share}"


def _check_directory(key: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise MachineError(
            f"{key} is {str(path)!r}, but its parent {str(path.parent)!r} is not a "
            "directory; create it, or mount the disk that should be there"
        )
    is_there = os.path.lexists(path)
    try:
        (check_directory if is_there else check_parent)(path)
    except NotOursError as error:
        raise MachineError(f"{key} is {str(path)!r}, which {error.why}") from error
    where = path if is_there else path.parent
    if not os.access(where, os.W_OK | os.X_OK):
        raise MachineError(f"{key} is {str(path)!r}, but {str(where)!r} cannot be written to")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A mounted tmpfs: its limit, which others fill too, and what is left of it."""

    total_bytes: int
    free_bytes: int


def shared_memory(directory: Path) -> SharedMemory:
    stat = os.statvfs(directory)
    if stat.f_blocks == 0:  # mounted with size=0: no limit
        return SharedMemory(_UNLIMITED, _UNLIMITED)
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def lacks_memory(asked: int, shared: SharedMemory, memory_bytes: int) -> str | None:
    """The message for who asks for so much DRAM, None if it is there.

    Args:
        asked: by all engines here; what the pool has beside its slots is in it.
        memory_bytes: that the machine, or the container, can still give.
    """
    if asked > shared.free_bytes:
        wanted = shared.total_bytes - shared.free_bytes + asked
        gib = -(-wanted // (1 << 30))
        return (
            f"shared memory ({SHM_DIR}) has {format_size(shared.free_bytes)} free of "
            f"{format_size(shared.total_bytes)}. Ask for less, or enlarge it:\n"
            f"  mount -o remount,size={gib}g {SHM_DIR}\n"
            f"  docker run --shm-size={gib}g ...\n"
            f"  Kubernetes: an emptyDir with medium: Memory and sizeLimit: {gib}Gi, mounted at "
            f"{SHM_DIR}"
        )
    if asked > memory_bytes:
        return (
            f"the machine, or its container, has {format_size(memory_bytes)} of memory. Ask for "
            "less, or give it more:\n"
            "  docker run --memory=...\n"
            "  Kubernetes: resources.limits.memory"
        )
    return None


def memory_available(given_back: int = 0) -> int:
    """The memory that the machine has left, or the limit of the control group that this process is
    in, whichever is less: a pool beyond that one is ended by the kernel without a word.

    Args:
        given_back: bytes in use that a start gives back first.
    """
    least = _UNLIMITED
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            least = int(line.split()[1]) * 1024 + given_back
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return least
    return min([least, *(_group_limit(_CGROUPS, line) for line in groups)])


def _group_limit(root: Path, line: str) -> int:
    """Bytes that a control group, named by a line of /proc/self/cgroup, may use."""
    _, controllers, name = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return _UNLIMITED
    # In a container the group's own name may be one that only its host can see: then the root
    # of what is mounted is the container's group.
    base = root / "memory" if controllers else root
    file = "memory.limit_in_bytes" if controllers else "memory.max"
    group = base / name.lstrip("/")
    limits = [_UNLIMITED]
    for directory in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            limits.append(int((directory / file).read_text()))
        if directory == base:
            break
    return min(limits)


# ---- locked memory -------------------------------------------------------------------------

# Asks the driver itself, in a process of its own: limits locked memory, then page-locks more.
_LOCK_PROBE = """
import ctypes, mmap, resource, sys
def checked(code):
    if code:
        sys.exit(2)
cuda = ctypes.CDLL(sys.argv[1])
device, context = ctypes.c_int(), ctypes.c_void_p()
checked(cuda.cuInit(0))
checked(cuda.cuDeviceGet(ctypes.byref(device), 0))
checked(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
checked(cuda.cuCtxSetCurrent(context))
soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
if soft < 0 or soft > 65536:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
memory = mmap.mmap(-1, 1 << 24)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
size, flags = ctypes.c_size_t(1 << 24), ctypes.c_uint(0)
sys.exit(77 if cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), size, flags) else 0)
"""
_COUNTS = 77  # what no other end of a Python process is
_PROBE_TIMEOUT_S = 60.0


def lacks_locked_memory(asked: int, limit: int, is_counted: Callable[[], bool]) -> str | None:
    """The message for who asks for so much page-locked memory, None if it may be had.

    Args:
        limit: RLIMIT_MEMLOCK.
        is_counted: whether the driver keeps to it; asked only where it matters.
    """
    if limit == resource.RLIM_INFINITY or asked <= limit or not is_counted():
        return None
    return (
        f"the limit on locked memory is {format_size(limit)}, and CUDA's driver keeps to it. Ask "
        "for less, or raise it:\n"
        "  ulimit -l unlimited       (the most that a user may: /etc/security/limits.conf)\n"
        "  docker run --ulimit memlock=-1 ...\n"
        "  systemd: LimitMEMLOCK=infinity, for Kubernetes in containerd.service"
    )


def driver_counts_locked_memory(library: str = "libcuda.so.1") -> bool:
    """Whether this machine's CUDA driver keeps to RLIMIT_MEMLOCK.

    Those of Linux do not: they pin pages without counting them, and a server whose limit is the
    usual 8 MiB is not to be refused for that. So one is asked, in a process of its own, since
    CUDA must not be begun in one that forks its workers. No answer means no.
    """
    command = [sys.executable, "-I", "-c", _LOCK_PROBE, library]
    try:
        found = subprocess.run(command, capture_output=True, check=False, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == _COUNTS


# ---- the disk ------------------------------------------------------------------------------


def _by_file_system(engines: Sequence[StoreConfig]) -> list[list[NvmeConfig]]:
    """Engines that share a file system must fit into it together."""
    found: dict[int, list[NvmeConfig]] = {}
    for part in (engine.nvme for engine in engines):
        if not os.path.isdir(part.named_path.parent):
            continue
        found.setdefault(_nearest(part.path).stat().st_dev, []).append(part)
    return list(found.values())


def _nearest(path: Path) -> Path:
    """The path, or the directory that it will be made in."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _check_disk(config: StoreConfig, parts: Sequence[NvmeConfig]) -> None:
    """Args: parts: engines of one file system, one at least."""
    paths = list(dict.fromkeys(part.named_path for part in parts))
    asked = sum(part.capacity_bytes for part in parts)
    stat = os.statvfs(_nearest(parts[0].path))
    free = stat.f_bavail * stat.f_frsize
    files = [part.path / name for part in parts for name in (SLAB_NAME, NODE_NAME)]
    held = sum(file.stat().st_blocks * 512 for file in files if file.is_file())
    if free + held < asked and stat.f_blocks == 0:
        raise MachineError(
            f"nvme.path is {str(paths[0])!r}, whose file system does not say its size; name a "
            "directory of a disk"
        )
    if free + held < asked:
        where = " and ".join(repr(str(path)) for path in paths)
        both = " (one file system)" if paths[1:] else ""
        raise MachineError(
            f"nvme.capacity is {_part(config.nvme.capacity_bytes, asked)}, but {where}{both} has "
            f"{format_size(free + held)} (free, or held by an earlier run); ask for less, or "
            "make room"
        )


@contextlib.contextmanager
def machine_errors(directory: Path) -> Iterator[None]:
    """Errors of a store's directory meanwhile become MachineError: they are said of the directory,
    and never of the model."""
    try:
        yield
    except NotOursError as error:
        raise MachineError(f"nvme.path is {str(directory)!r}: {error}") from error
    except (OSError, DeviceError) as error:
        raise MachineError(
            f"nvme.path is {str(directory)!r}, where the machine fails: {error}; check the disk, "
            "or name a directory of another one"
        ) from error


def remove_file_of_other_part(file: Path) -> None:
    """Remove a slab, or a NODE_NAME, of when this machine had another part in an engine. Both
    together take more than the capacity. The caller holds the directory's lock. Raises OSError."""
    if os.path.lexists(file):
        logger.warning(
            "%s is removed: this machine is %s of an engine now, and its NVMe tier begins empty",
            file,
            "another node" if file.name == SLAB_NAME else "the first node",
        )
        file.unlink()


def _lock(directory: Path, fd: int) -> None:
    """Lock a file of the directory. Raises: MachineError, BlockingIOError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise MachineError(
            f"nvme.path is {str(directory)!r}, where a file cannot be locked: {error}. Its file "
            "system has no locks, as NFS may have none; name a directory of a local disk"
        ) from error


def _check_locks(part: NvmeConfig) -> None:
    """Raise MachineError if the directory cannot be locked, or a running engine owns it."""
    where = _nearest(part.path)
    with machine_errors(part.path), tempfile.TemporaryFile(dir=where) as file:  # it has no name
        _lock(part.path, file.fileno())
    check_unlocked(part.path)


def check_unlocked(directory: Path) -> None:
    """Raise MachineError if a running engine owns `directory`, or it cannot be looked at."""
    with machine_errors(directory):
        try:
            fd = open_own(directory / LOCK_NAME, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            _lock(directory, fd)
        except BlockingIOError:
            raise _owned(directory, fd) from None
        finally:
            os.close(fd)


def lock_directory(directory: Path, parent: int | None = None) -> int:
    """Take the directory for this process; returns the descriptor that holds the lock.

    The lock goes with the descriptor, so no exit leaves it behind.

    Args:
        parent: the process with whose end this one ends, if there is one. Told to who is refused.
    Raises: MachineError if another engine has it, if the directory is not this user's alone, or
        if the machine refuses anything of it.
    """
    with machine_errors(directory):
        if directory.name.startswith("dp"):  # an engine's own, below what the setting names
            make_directory(directory.parent)
        make_directory(directory)
        fd = open_own(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            _lock(directory, fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {parent or 0} {platform.node()}\n".encode(), 0)
        except BlockingIOError:
            owned = _owned(directory, fd)
            os.close(fd)
            raise owned from None
        except (OSError, MachineError):
            os.close(fd)
            raise
    return fd


def _owned(directory: Path, fd: int) -> MachineError:
    owner, advice = owner_of(printable(os.pread(fd, 512, 0).decode(errors="replace").strip()))
    return MachineError(
        f"nvme.path is {str(directory)!r}, which a running engine ({owner}) owns; {advice}"
    )


def owner_of(said: str) -> tuple[str, str]:
    """(Who owns a directory, what to do about it), from the text of its lock."""
    advice = "give each server a directory of its own, or stop the other one"
    words = said.split(maxsplit=2)
    if not words or not all(word.isdecimal() for word in words[:2]):
        return "process unknown", advice
    pid, parent, host = words[0], (words[1:2] or ["0"])[0], (words[2:] or [""])[0].strip()
    if host != platform.node():  # another container's numbers are not ours
        where = f" on {host!r}" if host else ""
        return f"process {pid}{where}", advice
    if parent == "0" or not _lives(pid) or _lives(parent):
        return f"process {pid}", advice
    return (
        f"process {pid}, whose parent {parent} is gone",
        f"it writes back what it has and ends within 5 s: start again. If it does not, its disk "
        f"or its GPU hangs: kill -9 {pid}",
    )


def _lives(pid: str) -> bool:
    """Whether there is such a process that we can see."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
