# SPDX-License-Identifier: Apache-2.0
"""The NUMA node of a disk, and a warning where the GPUs that use it are on others."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

logger = logging.getLogger(__name__)

_BLOCK_DEVICES = Path("/sys/dev/block")


def disk_numa_node(path: Path) -> int | None:
    """The NUMA node of the block device below a path, None if the machine does not say: as most
    with one node, or of a device that has no place of its own (a RAID, a network file system).

    Args:
        path: may be yet to be made: then that of the directory which it will be in.
    """
    try:
        device = next(each for each in (path, *path.parents) if each.exists()).stat().st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        found = (_BLOCK_DEVICES / name).resolve(strict=True)
        # A partition lies in its disk, the disk in its controller, which knows its node.
        places = (each / "numa_node" for each in (found, *found.parents))
        node = int(next(place for place in places if place.is_file()).read_text())
    except (OSError, ValueError, StopIteration):
        return None
    return node if node >= 0 else None


def warn_if_far(path: Path, gpu_nodes: Collection[int]) -> None:
    """Say so where an engine's disk is on another NUMA node than all of its GPUs.

    Args:
        gpu_nodes: of all its GPUs; empty if one is not known.
    """
    node = disk_numa_node(path)
    if node is None or not gpu_nodes or node in gpu_nodes:
        return
    logger.warning(
        "%s is on a disk of NUMA node %d, but the GPUs of this engine are on node %s; expected a "
        "disk of that node. Name the paths of nvme.path in the order of their nodes, which "
        "attnstore doctor shows, or name a disk near the GPUs",
        path,
        node,
        ", ".join(map(str, sorted(set(gpu_nodes)))),
    )
