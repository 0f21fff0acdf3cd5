# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

Copies = npt.NDArray[np.int64]

class PageCopier:
    def __init__(
        self,
        *,
        slots_base: int,
        num_slots: int,
        slot_bytes: int,
        layer_bytes: int,
        page_bytes: int,
        layer_bases: list[int],
        num_blocks: int,
        block_stride: int,
        run_offsets: list[int],
        run_bytes: int,
        num_threads: int,
    ) -> None: ...
    def load(self, first: Copies, rest: Copies) -> None: ...
    def wait_layer(self, layer: int) -> None: ...
    def save(self, copies: Copies) -> None: ...

has_uring: bool
"""Whether Uring is there: the extension was built with liburing and xxhash.h."""

def page_checksums(pages: Buffer, page_bytes: int, zero_at: int) -> bytes:
    """Not there if the extension was built without xxhash.h."""

class Uring:
    def __init__(
        self,
        *,
        fd: int,
        depth: int,
        regions: list[tuple[int, int]],
        piece_bytes: int,
        num_hash_threads: int,
    ) -> None: ...
    @property
    def has_regions(self) -> bool: ...
    def submit(
        self,
        requests: Sequence[
            tuple[int, int, int, tuple[memoryview, ...], tuple[tuple[int, int], ...], bool]
        ],
    ) -> bool: ...
    def cancel(self, tags: list[int]) -> None: ...
    def poll(self, timeout_s: float) -> list[tuple[int, int, str, bytes]]: ...
    def wake(self) -> None: ...
    def failure(self) -> str: ...
    def close(self, timeout_s: float) -> bool: ...
