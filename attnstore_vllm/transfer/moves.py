# SPDX-License-Identifier: Apache-2.0
"""Which tokens are loaded at other positions than they were computed at. Pure, as plan.py is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Moved = npt.NDArray[np.int64]
"""[n, 6], in the order of MovedRun's fields without the group: what the native PageRotator of one
group takes."""


class StoredTokens(NamedTuple):
    """Tokens of one stored chunk that a request has at [start, stop)."""

    slot: int
    """The chunk's DRAM slot."""
    first: int
    """The first of these tokens, counted from the chunk's first."""
    position: int
    """Where that token was when its KV was computed."""
    start: int
    """Where it is in the request."""
    stop: int


class MovedRun(NamedTuple):
    """Tokens that follow each other in one chunk and in one block; all layers of their group are
    copied."""

    slot: int
    first: int
    """The first of them, counted from the chunk's first."""
    num_tokens: int
    block_id: int
    """vLLM's block."""
    within: int
    """The first of them, counted from the block's first."""
    shift: int
    """By how many positions K is rotated: target less source."""
    group: int = 0
    """Among the geometry's: it says which layers there are, and how they rotate."""


def plan_moves(
    pieces: Iterable[StoredTokens],
    block_ids: Sequence[int],
    *,
    block_tokens: int,
    chunk_tokens: int,
    group: int = 0,
) -> tuple[MovedRun, ...]:
    """The runs that fill a request's blocks of one group with the KV of these pieces, in their
    order.

    Args:
        pieces: in the order of their places, which do not overlap; what lies between them is not
            written to.
        block_ids: the request's blocks from its token 0 on.
    """
    runs: list[MovedRun] = []
    before = 0
    for piece in pieces:
        slot, first, position, start, stop = piece
        assert before <= start < stop, f"{piece} is not behind the one before it"
        assert position >= 0
        assert 0 <= first <= chunk_tokens - (stop - start), f"{piece} is not within its chunk"
        assert stop <= len(block_ids) * block_tokens, f"{piece} is not within the blocks"
        at = start
        while at < stop:
            block, within = divmod(at, block_tokens)
            count = min(block_tokens - within, stop - at)
            source = first + at - start
            shift = start - position
            runs.append(MovedRun(slot, source, count, block_ids[block], within, shift, group))
            at += count
        before = stop
    return tuple(runs)


def moved_table(runs: Iterable[MovedRun]) -> Moved:
    """The table of these runs, which are of one group."""
    table = np.array(list(runs), np.int64).reshape(-1, len(MovedRun._fields))
    return np.ascontiguousarray(table[:, :-1])


def tables_by_group(runs: Iterable[MovedRun]) -> dict[int, Moved]:
    """The table of each group that has runs."""
    by_group: dict[int, list[MovedRun]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return {group: moved_table(some) for group, some in by_group.items()}


def num_tokens(runs: Iterable[MovedRun]) -> int:
    """K and V of so many tokens are read once and written once, in each layer."""
    return sum(run.num_tokens for run in runs)
