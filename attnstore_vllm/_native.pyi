# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

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
