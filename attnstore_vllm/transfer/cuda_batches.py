# SPDX-License-Identifier: Apache-2.0
"""Pages of one copy on CUDA: all that does not depend on the layer, worked out once.

Layers come one by one with the same pages, so that a layer costs one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.transfer.cuda_methods import Copy, Rule, Rules, choose
from attnstore_vllm.transfer.engine import Pages, Rows

PAGES_AT_ONCE = 1 << 14
"""The most pages that one table may have."""


class BatchPart(NamedTuple):
    """Some of the pages, in one kind of layers."""

    native: Any
    """A PageBatch of _native_cuda."""
    words: npt.NDArray[np.int64]
    """The table that the kernel reads; always the same object."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages and rows that exist."""

    pages: Pages
    rows: Rows
    rules: Rules
    kinds: tuple[tuple[Rule, tuple[BatchPart, ...]], ...]
    """The way that each kind of layers goes, and its parts."""

    def is_of(self, pages: Pages, rows: Rows, rules: Rules) -> bool:
        """Whether it was made of these very objects."""
        return self.pages is pages and self.rows is rows and self.rules is rules


def make_batch(
    copy: Copy, native_copy: Any, pages: Pages, rows: Rows, rules: Rules, copiers: Sequence[Any]
) -> Batch:
    """Check pages and rows, and choose a way for each kind. The arrays are read-only from then on.

    Args:
        copiers: a PageCopier of _native_cuda for each kind of layers.
    Raises: IndexError for a slot, block or row that does not exist; ValueError for arrays of
        another shape.
    """
    kinds = []
    for copier in copiers:
        parts = []
        for first in range(0, max(1, len(pages)), PAGES_AT_ONCE):
            at = slice(first, first + PAGES_AT_ONCE)
            native = copier.prepare(native_copy, pages[at], rows[at])
            parts.append(BatchPart(native, native.words))
        num_runs = sum(part.native.num_runs for part in parts)
        run_bytes = len(pages) * copier.page_bytes / max(1, num_runs)
        kinds.append((choose(rules, copy, run_bytes), tuple(parts)))
    for array in (pages, rows):
        array.setflags(write=False)
    return Batch(pages, rows, rules, tuple(kinds))
