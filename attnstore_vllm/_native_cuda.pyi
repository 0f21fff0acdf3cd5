# SPDX-License-Identifier: Apache-2.0
"""Not there if the package was built without nvcc."""

import numpy as np
import numpy.typing as npt

from attnstore_vllm import _native

Copies = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Moved = npt.NDArray[np.int64]

runtime_version: int
"""Of the CUDA runtime that is linked in: 13000 is 13.0."""

class Copy:
    LOAD: Copy
    SAVE: Copy
    GATHER: Copy
    DRAIN: Copy

def register_host(address: int, num_bytes: int) -> int:
    """Page-lock memory; its address as the device sees it. Raises RuntimeError."""

def unregister_host(address: int) -> None: ...

class PageShape(_native.PageShape): ...
class RotationShape(_native.RotationShape): ...

class PageCopier:
    def __init__(self, pages: PageShape, *, device: int, arrays: int) -> None: ...
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
        """What has to lie, 16 bytes aligned, where the kernel reads it; a copy."""
    @property
    def num_tokens(self) -> int: ...

class PageRotator:
    def __init__(
        self, pages: PageShape, rotation: RotationShape, *, device: int, arrays: int
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
