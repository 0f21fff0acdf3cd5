# SPDX-License-Identifier: Apache-2.0
"""Does the machine have what the settings ask for? Asked before the model loads.

These checks take nothing: the pool and the slab file are allocated, and the directory is
locked, by the engine itself, which checks again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from attnstore_vllm.config import StoreConfig, format_size
from attnstore_vllm.errors import ConfigError

SHM_DIR = Path("/dev/shm")
LOCK_NAME = "lock"
SLAB_NAME = "slab"


def check_machine(config: StoreConfig) -> None:
    """Raise ConfigError for the first setting that this machine cannot meet."""
    _check_directory(config.nvme.path)
    _check_shared_memory(config.dram_bytes)
    _check_disk(config)
    for directory in _engine_directories(config):
        check_unlocked(directory)


def _engine_directories(config: StoreConfig) -> list[Path]:
    if config.data_parallel_size == 1:
        return [config.nvme.path]
    return [config.share(rank).nvme.path for rank in range(config.data_parallel_size)]


def _check_directory(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(
            f"nvme.path is {str(path)!r}, but its parent {str(path.parent)!r} is not a "
            "directory; create it, or mount the disk that should be there"
        )
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(
            f"nvme.path is {str(path)!r}, which is a link or a file; it must be a directory "
            "(or a name that can be created as one)"
        )
    where = path if path.exists() else path.parent
    if not os.access(where, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme.path is {str(path)!r}, but {str(where)!r} cannot be written to")


def _check_shared_memory(dram_bytes: int) -> None:
    stat = os.statvfs(SHM_DIR)
    free = stat.f_bavail * stat.f_frsize
    free = min(free, _memory_available())
    if free < dram_bytes:
        raise ConfigError(
            f"dram is {format_size(dram_bytes)}, but shared memory ({SHM_DIR}) has "
            f"{format_size(free)} free; ask for less, or enlarge it "
            "(mount -o remount,size=..., or docker run --shm-size=...)"
        )


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # a kernel that does not say is not a reason to refuse


def _check_disk(config: StoreConfig) -> None:
    path = config.nvme.path
    stat = os.statvfs(path if path.exists() else path.parent)
    free = stat.f_bavail * stat.f_frsize
    held = sum(
        slab.stat().st_blocks * 512
        for directory in _engine_directories(config)
        if (slab := directory / SLAB_NAME).is_file()
    )
    if free + held < config.nvme.capacity_bytes:
        raise ConfigError(
            f"nvme.capacity is {format_size(config.nvme.capacity_bytes)}, but {str(path)!r} has "
            f"{format_size(free + held)} (free, or held by an earlier run); ask for less, or "
            "make room"
        )


def check_unlocked(directory: Path) -> None:
    """Raise ConfigError if a running engine owns `directory`."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"nvme.path is {str(directory)!r}: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _owned(directory, fd) from None
    finally:
        os.close(fd)


def lock_directory(directory: Path) -> int:
    """Take the directory for this process; returns the descriptor that holds the lock.

    The lock goes with the descriptor, so no exit leaves it behind.
    Raises: ConfigError if another engine has it, or if the directory cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=directory.name.startswith("dp"), exist_ok=True)
        fd = os.open(
            directory / LOCK_NAME,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
    except OSError as error:
        raise ConfigError(f"nvme.path is {str(directory)!r}: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owned = _owned(directory, fd)
        os.close(fd)
        raise owned from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _owned(directory: Path, fd: int) -> ConfigError:
    owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    return ConfigError(
        f"nvme.path is {str(directory)!r}, which a running engine (process {owner}) owns; give "
        "each server a directory of its own, or stop the other one"
    )
