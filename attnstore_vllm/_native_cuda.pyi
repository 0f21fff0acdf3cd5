# SPDX-License-Identifier: Apache-2.0
"""Importing it needs neither a GPU nor its driver."""

import numpy as np
import numpy.typing as npt

from attnstore_vllm import _native

Copies = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Moved = npt.NDArray[np.int64]

def why_no_driver() -> str:
    """Why NVIDIA's driver cannot be used on this machine; "" if it can. Then all below raises
    RuntimeError."""

def driver_version() -> int:
    """The CUDA version that the driver is of: 12040 is 12.4. Raises RuntimeError."""

def capability(device: int) -> tuple[int, int]:
    """The device's compute capability: (9, 0) is sm_90. Raises RuntimeError."""

class Kernels:
    """The kernels of csrc/cuda/kernels.cu, loaded on one device.

    Args:
        images: cubins and PTX, of which the first that the driver takes is used.
    Raises: RuntimeError that says why it takes none.
    """

    def __init__(self, device: int, images: list[bytes]) -> None: ...
    @property
    def image(self) -> int:
        """Which of the images it is."""

class Copy:
    LOAD: Copy
    SAVE: Copy
    GATHER: Copy
    DRAIN: Copy

def register_host(address: int, num_bytes: int, device: int) -> int:
    """Page-lock memory; its address as the device sees it. Raises RuntimeError."""

def unregister_host(address: int, device: int) -> None: ...

class PageShape(_native.PageShape): ...
class RotationShape(_native.RotationShape): ...

class PageCopier:
    """Without kernels it only checks and counts."""

    def __init__(self, pages: PageShape, *, kernels: Kernels | None, arrays: int) -> None: ...
    def by_kernel(
        self,
        copy: Copy,
        copies: Copies,
        rows: Rows,
        first_layer: int,
        stop_layer: int,
        table_device: int,
        table_host: int,
        thread_blocks: int,
        stream: int,
    ) -> None: ...
    def by_dma(
        self,
        copy: Copy,
        copies: Copies,
        rows: Rows,
        first_layer: int,
        stop_layer: int,
        stream: int,
    ) -> None: ...
    def count_runs(self, copy: Copy, copies: Copies, rows: Rows) -> int: ...

class MoveTable:
    """Tokens that go to other positions, as the kernel of PageRotator reads them."""

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """Words that must lie, 16 bytes aligned, where the kernel reads them; a copy."""
    @property
    def num_tokens(self) -> int: ...

class PageRotator:
    def __init__(
        self, pages: PageShape, rotation: RotationShape, *, kernels: Kernels | None, arrays: int
    ) -> None: ...
    def check(self, moved: Moved, first_layer: int, stop_layer: int) -> None:
        """Raises IndexError for what does not exist, and for a place that is named twice."""
    def table(self, moved: Moved) -> MoveTable:
        """Raises IndexError as check() does."""
    def load(
        self,
        table: MoveTable,
        first_layer: int,
        stop_layer: int,
        table_device: int,
        table_host: int,
        thread_blocks: int,
        stream: int,
    ) -> None: ...
    @property
    def is_wide(self) -> bool:
        """K and V are read and written 16 bytes at a time, and not by element."""
