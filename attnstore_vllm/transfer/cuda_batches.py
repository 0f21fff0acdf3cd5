# SPDX-License-Identifier: Apache-2.0
"""Pages of one copy on CUDA: all that does not depend on the layer, worked out once.

Layers come one by one with the same pages, so that a layer costs one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.transfer.cuda_cells import CODE_BLOCKS
from attnstore_vllm.transfer.cuda_methods import Copy, Method, Rule, Rules, choose
from attnstore_vllm.transfer.engine import Pages, Rows

PAGES_AT_ONCE = 1 << 14
"""The most pages that one table may have."""


class Fill(NamedTuple):
    """Pages of a part that are in a span of the read buffer together."""

    native: Any
    """A PageBatch of _native_cuda."""
    first: int
    """In the part."""
    num_pages: int


class BatchPart(NamedTuple):
    """Some of the pages, in one kind of layers."""

    native: Any
    """A PageBatch of _native_cuda."""
    words: npt.NDArray[np.int64]
    """The table that the kernel reads; always the same object."""
    fills: tuple[Fill, ...] = ()
    """Through the read buffer."""


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
    copy: Copy, native_copies: Any, pages: Pages, rows: Rows, rules: Rules, copiers: Sequence[Any]
) -> Batch:
    """Check pages and rows, and choose a way for each kind. The arrays are read-only from then on.

    What is to go through the read buffer, where a span takes none of its pages, goes by DMA. What
    is encoded or decoded goes by the kernel; a load of cells, where there is a read buffer, through
    it unless a rule says that the kernel is to read slots.

    Args:
        native_copies: Copy of _native_cuda.
        copiers: a PageCopier of _native_cuda for each kind of layers.
    Raises: IndexError for a slot, block or row that does not exist; ValueError for arrays of
        another shape.
    """
    kinds = []
    for copier in copiers:
        is_coded = copier.is_encoded and copy is not Copy.DRAIN
        make = _coded if is_coded else _plain
        kinds.append(make(copy, native_copies, pages, rows, rules, copier))
    for array in (pages, rows):
        array.setflags(write=False)
    return Batch(pages, rows, rules, tuple(kinds))


_Kind = tuple[Rule, tuple[BatchPart, ...]]


def _plain(
    copy: Copy, native_copies: Any, pages: Pages, rows: Rows, rules: Rules, copier: Any
) -> _Kind:
    """A kind of layers whose bytes stay as they are."""
    parts = _directly(copier, getattr(native_copies, copy.name), pages, rows)
    rule = choose(rules, copy, _run_bytes(copier, pages, [part.native for part in parts]))
    if rule.method is Method.BUFFER:
        if copy is Copy.LOAD and copier.span_pages:
            parts = _all_through_spans(copier, native_copies, pages)
        else:
            rule = replace(rule, method=Method.DMA)
    return rule, parts


def _coded(
    copy: Copy, native_copies: Any, pages: Pages, rows: Rows, rules: Rules, copier: Any
) -> _Kind:
    """A kind of layers whose pages are encoded or decoded."""
    if copy is Copy.LOAD and copier.span_pages:
        parts = _all_through_spans(copier, native_copies, pages)
        fills = [fill.native for part in parts for fill in part.fills]
        rule = choose(rules, copy, _run_bytes(copier, pages, fills))
        if rule.method is not Method.KERNEL:
            blocks = max(CODE_BLOCKS, rule.thread_blocks)
            return replace(rule, method=Method.BUFFER, thread_blocks=blocks), parts
    parts = _directly(copier, getattr(native_copies, copy.name), pages, rows)
    rule = choose(rules, copy, copier.page_bytes)
    blocks = max(CODE_BLOCKS, rule.thread_blocks)
    return replace(rule, method=Method.KERNEL, thread_blocks=blocks), parts


def _run_bytes(copier: Any, pages: Pages, batches: Sequence[Any]) -> float:
    """The length of a run in one layer, on average."""
    num_runs = sum(batch.num_runs for batch in batches)
    return float(len(pages) * copier.page_bytes / max(1, num_runs))


def _directly(copier: Any, native_copy: Any, pages: Pages, rows: Rows) -> tuple[BatchPart, ...]:
    parts = []
    for first in range(0, max(1, len(pages)), PAGES_AT_ONCE):
        at = slice(first, first + PAGES_AT_ONCE)
        native = copier.prepare(native_copy, pages[at], rows[at])
        parts.append(BatchPart(native, native.words))
    return tuple(parts)


def _all_through_spans(copier: Any, native_copies: Any, pages: Pages) -> tuple[BatchPart, ...]:
    return tuple(
        _through_spans(copier, native_copies, pages[first : first + PAGES_AT_ONCE])
        for first in range(0, max(1, len(pages)), PAGES_AT_ONCE)
    )


def _through_spans(copier: Any, native_copies: Any, pages: Pages) -> BatchPart:
    """As many pages a span as it takes, in their order."""
    in_span = np.arange(len(pages)) % copier.span_pages
    scatter = copier.prepare(native_copies.SCATTER, pages, in_span)
    fills = []
    for first in range(0, len(pages), copier.span_pages):
        some = pages[first : first + copier.span_pages]
        native = copier.prepare(native_copies.FILL, some, np.arange(len(some)))
        fills.append(Fill(native, first, len(some)))
    return BatchPart(scatter, scatter.words, tuple(fills))
