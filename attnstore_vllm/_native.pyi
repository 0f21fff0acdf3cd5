# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

class CopyQueue:
    def __init__(self, num_threads: int) -> None: ...
    def submit(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        num_bytes: int,
    ) -> int: ...
    def wait(self, ticket: int) -> None: ...
