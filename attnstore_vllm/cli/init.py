# SPDX-License-Identifier: Apache-2.0
"""`attnstore init`: a commented YAML of settings, sized for this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from attnstore_vllm import preflight
from attnstore_vllm.config.texts import as_yaml
from attnstore_vllm.config.values import SIZE_MIN, format_size, parse_size
from attnstore_vllm.errors import ConfigError

GIB = 1 << 30
_SHARE = 0.5
"""The share of free space that is used: the model needs memory too, and others the disk."""


def settings_for(
    directory: Path, dram: str | None, nvme: str | None, *, every: bool = False
) -> str:
    """The YAML. Sizes that are not given are half of what is free.

    Args: every: all settings, not only those that people change.
    Raises: ConfigError if a size makes no sense, or the directory's disk is not there.
    """
    path = directory.absolute()
    if not path.parent.is_dir():
        raise ConfigError(
            f"--dir is {str(directory)!r}, but {str(path.parent)!r} is not a directory; mount "
            "the disk first, or name another one"
        )
    shared = preflight.shared_memory(preflight.SHM_DIR).free_bytes
    free_dram = min(shared, preflight.memory_available())
    free_nvme = shutil.disk_usage(path if path.is_dir() else path.parent).free
    return as_yaml(
        {
            "dram": _size("--dram", dram, free_dram),
            "nvme.path": str(path),
            "nvme.capacity": _size("--nvme", nvme, free_nvme),
        },
        every=every,
    )


def _size(option: str, given: str | None, free: int) -> str:
    if given is not None:
        parse_size(option, given, SIZE_MIN)
        return given
    half = int(free * _SHARE)
    size = half // GIB * GIB if half >= GIB else half // SIZE_MIN * SIZE_MIN
    return format_size(max(size, SIZE_MIN)) if size < 1024 * GIB else f"{size // GIB}GiB"
