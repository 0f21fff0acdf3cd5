# SPDX-License-Identifier: Apache-2.0
"""Which Device serves a file: io_uring where it can, any file system through aiofiles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.io.aiofiles_device import AiofilesDevice
from attnstore_vllm.io.device import Device
from attnstore_vllm.io.uring_device import UringDevice, UringUnavailableError

logger = logging.getLogger(__name__)

DeviceKind = Literal["auto", "uring", "aiofiles"]


def open_device(
    path: Path, depth: int, kind: DeviceKind, regions: Sequence[tuple[int, int]] = ()
) -> tuple[Device, str]:
    """The device for an existing file, and what it is, in words for a log.

    Args: as UringDevice has them. "auto" takes io_uring if it can, and says why if it cannot.

    Raises: DeviceError if the file cannot be opened; ConfigError if io_uring is asked for by name
    and cannot be had.
    """
    if kind != "aiofiles":
        try:
            uring = UringDevice(path, depth, regions=regions)
        except UringUnavailableError as error:
            if kind == "uring":
                raise ConfigError(
                    f"io_uring is asked for, but cannot be had: {error}. "
                    'With "auto" the file is served by threads.'
                ) from error
            logger.warning("%s is served by threads, not by io_uring: %s", path, error)
        else:
            pinned = ", pinned buffers" if uring.has_regions else ""
            return uring, f"io_uring, O_DIRECT{pinned}"
    threads = AiofilesDevice(path, depth)
    cached = "O_DIRECT" if threads.is_direct else "through the page cache"
    return threads, f"aiofiles, {cached}"
