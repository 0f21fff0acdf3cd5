# SPDX-License-Identifier: Apache-2.0
"""The kernels that a device gets: attnstore_vllm/kernels has them compiled (tools/make_kernels.py).

A device runs cubins of its own generation that are not newer than itself. For any other there is
PTX, which the driver compiles when it is loaded (and keeps, in ~/.nv/ComputeCache). Drivers refuse
cubins that are newer than they are; then they get the PTX as well.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from attnstore_vllm.errors import UnsupportedError

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent.parent / "kernels"
OLDEST = (8, 0)
OLDEST_DRIVER = "525"
"""That knows the PTX (tools/make_kernels.py: PTX_VERSION)."""


def images_for(capability: tuple[int, int], folder: Path = FOLDER) -> list[Path]:
    """The images that such a device may run, the best first. Empty: it is too old."""
    if capability < OLDEST:
        return []
    major, minor = capability
    cubins = {
        divmod(int(path.stem.removeprefix("sm_")), 10): path for path in folder.glob("sm_*.cubin")
    }
    fitting = [one for one in cubins if one[0] == major and one[1] <= minor]
    return [*(cubins[one] for one in sorted(fitting, reverse=True)), *folder.glob("*.ptx")]


def native_module() -> ModuleType:
    """The CUDA half, with a driver that works. Raises: UnsupportedError."""
    try:
        import attnstore_vllm._native_cuda as native  # noqa: PLC0415
    except ImportError as error:
        raise UnsupportedError(
            f"attnstore_vllm has no _native_cuda here ({error}); install the package again"
        ) from error
    if why_not := native.why_no_driver():
        raise UnsupportedError(why_not)
    return native


def load_kernels(native: ModuleType, device: int) -> Any:
    """Kernels of _native_cuda, loaded on a device.

    Raises: UnsupportedError if the device is too old, or the driver refuses them all.
    """
    capability = native.capability(device)
    images = images_for(capability)
    named = f"GPU {device}, of compute capability {capability[0]}.{capability[1]},"
    if not images:
        raise UnsupportedError(
            f"{named} has no kernels in attnstore_vllm; {OLDEST[0]}.{OLDEST[1]} is the oldest that "
            "has"
        )
    try:
        kernels = native.Kernels(device, [path.read_bytes() for path in images])
    except RuntimeError as error:
        version = native.driver_version()
        raise UnsupportedError(
            f"{named} refuses attnstore_vllm's kernels ({error}); its driver is of CUDA "
            f"{version // 1000}.{version % 1000 // 10}, and {OLDEST_DRIVER} (CUDA 12.0) is the "
            "oldest that takes them"
        ) from error
    logger.info("CUDA kernels: %s on %s", images[kernels.image].name, named.rstrip(","))
    return kernels
