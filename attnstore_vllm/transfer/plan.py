# SPDX-License-Identifier: Apache-2.0
"""The copies that workers are to make, decided on the scheduler side, and which tokens are loaded
at other positions than they were computed at. The workers only obey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
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


class TokenRun(NamedTuple):
    """Tokens of a prompt that stand in a row, and are computed by a pass of our own."""

    start: int
    """Position of the first."""
    token_ids: Sequence[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


CHOSEN_TOGETHER = 8
"""Neighbours among tokens of documents that are chosen together. 400 tokens, each alone in its row
of a pass, cost a quarter more than in groups of eight, and answers are no better for it."""


class Selection(NamedTuple):
    """Which tokens of its documents a request computes anew: those whose K differs most from what
    was loaded (connector/document_passes.py)."""

    gaps: tuple[range, ...]
    """Tokens between the documents, which are all computed."""
    num_chosen: int
    """Tokens of the documents."""
    part: range
    """Those that this pass computes, of all that are, in the order of their positions. Empty: it
    compares its runs with what was loaded."""


class PassPlan(NamedTuple):
    """Tokens that one step computes between a request's documents (connector/own_pass.py)."""

    request_id: str
    runs: tuple[TokenRun, ...]
    """In the order of their positions; none where a selection says which."""
    block_ids: tuple[tuple[int, ...], ...]
    """The request's, by KV cache group."""
    selection: Selection | None = None


class ChunkCopy(NamedTuple):
    """Consecutive blocks of a chunk and as many blocks of HBM; every layer of them is copied."""

    slot: int
    """The chunk's DRAM slot."""
    first: int
    """The first of the chunk's blocks that is copied."""
    block_ids: tuple[int, ...]
    """vLLM's blocks."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Copies in one direction that complete together, on every rank."""

    plan_id: int
    request_id: str
    copies: tuple[ChunkCopy, ...]
    is_fleeting: bool = field(default=False, kw_only=True)
    """In a save: the blocks are others' from the next step on, so it is made in this one, or given
    up."""

    def __post_init__(self) -> None:
        assert self.copies, "an empty plan is a caller's bug: do not send it"

    @property
    def num_blocks(self) -> int:
        return sum([len(block_ids) for _, _, block_ids in self.copies])


@dataclass(frozen=True, slots=True)
class LoadPlan(TransferPlan):
    """Blocks that are filled from slots."""

    num_partial: int = 0
    """So many blocks at the end of the copies are partly filled: they receive new tokens."""
    layers_before: int = 0
    """0: for this step's forward pass. Else ahead of it: received when so many layers are there."""
    moves: tuple[MovedRun, ...] = ()
    """Token by token, after the copies; complete before the forward pass."""
    has_more: bool = False
    """Ahead: a part of a load; the request is received with its last part."""
    missing: tuple[int, ...] = ()
    """In a last part: the blocks that no part has filled. vLLM computes them."""
    has_failed: bool = False
    """Ahead: it copies nothing, and its request is told that its load has failed."""

    def __post_init__(self) -> None:
        is_end = self.layers_before and not self.has_more
        assert self.copies or self.moves or is_end, "an empty plan is a caller's bug"


def pages(copies: Iterable[ChunkCopy]) -> npt.NDArray[np.int64]:
    """[blocks, 3], int64: DRAM slot, block of the chunk, block id."""
    copies = list(copies)
    counts = np.array([len(copy.block_ids) for copy in copies], np.int64)
    ends = np.cumsum(counts)
    table = np.empty((counts.sum(), 3), np.int64)
    table[:, 0] = np.repeat([copy.slot for copy in copies], counts)
    firsts = np.array([copy.first for copy in copies], np.int64)
    table[:, 1] = np.arange(len(table)) + np.repeat(firsts - ends + counts, counts)
    table[:, 2] = np.fromiter(chain.from_iterable(copy.block_ids for copy in copies), np.int64)
    return table


def plan_load(
    slots: Sequence[tuple[int, int, int]],
    block_ids: Sequence[int],
    start: int,
    stop: int,
    *,
    block_tokens: int,
    chunk_tokens: int,
    places: int = 0,
) -> tuple[ChunkCopy, ...]:
    """The copies that fill a request's blocks of one group with the KV of its tokens [start, stop).

    Whole blocks are copied; what a last, partly filled block has beyond `stop` is overwritten
    by the request's own tokens before anything reads it.

    Args:
        slots: (slot, first token, end token) of the chunks, in order, covering [start, stop).
        block_ids: the request's blocks from its token 0 on.
        start: a multiple of block_tokens, since vLLM's own hits end on a block.
        places: see Geometry.room().
    """
    assert start % block_tokens == 0
    assert start < stop
    copies: list[ChunkCopy] = []
    token, blocks = start, tuple(block_ids)
    for slot, first, last in slots:
        assert first <= token < last, "the chunks do not follow each other"
        block, end = token // block_tokens, -(-(last if last < stop else stop) // block_tokens)
        within = token % chunk_tokens // block_tokens
        if places:
            copies += in_places(slot, within, blocks[block:end], places)
        else:
            copies.append(ChunkCopy(slot, within, blocks[block:end]))
        token = end * block_tokens
    assert stop <= token <= len(blocks) * block_tokens, "the chunks or the blocks end before"
    return tuple(copies)


def in_places(slot: int, first: int, block_ids: tuple[int, ...], places: int) -> list[ChunkCopy]:
    """The copies of a chunk's blocks from number `first` on, where a slot has fewer places."""
    assert len(block_ids) <= places, "two blocks would have one place"
    place = first % places
    parts = ((place, block_ids[: places - place]), (0, block_ids[places - place :]))
    return [ChunkCopy(slot, at, ids) for at, ids in parts if ids]


def last_blocks_last(
    groups: Iterable[tuple[tuple[ChunkCopy, ...], bool]],
) -> tuple[tuple[ChunkCopy, ...], int]:
    """The copies of all groups as those of one plan, and its num_partial.

    Args:
        groups: the copies of each, and whether its last block is partly filled.
    """
    whole: list[ChunkCopy] = []
    partial: list[ChunkCopy] = []
    for copies, is_partial in groups:
        whole += copies
        if not copies or not is_partial:
            continue
        slot, first, block_ids = whole.pop()
        if len(block_ids) > 1:
            whole.append(ChunkCopy(slot, first, block_ids[:-1]))
        partial.append(ChunkCopy(slot, first + len(block_ids) - 1, block_ids[-1:]))
    return (*whole, *partial), len(partial)


def plan_save(
    slot: int,
    block_ids: Sequence[int],
    position: int,
    num_tokens: int,
    *,
    block_tokens: int,
    hole: int = 0,
    places: int = 0,
) -> tuple[ChunkCopy, ...]:
    """The copies that fill a chunk's slot from a request's blocks of one group.

    Args:
        position: the chunk's first token, a multiple of the chunk's size.
        num_tokens: how many tokens it has; the last block may be partly filled.
        hole: leading blocks of it that are not there (index/sections.py).
        places: see Geometry.room().
    """
    first = position // block_tokens
    num_blocks = -(-num_tokens // block_tokens)
    assert len(block_ids) >= first + num_blocks
    copied = tuple(block_ids[first + hole : first + num_blocks])
    if places:
        return tuple(in_places(slot, hole, copied, places))
    return (ChunkCopy(slot, hole, copied),)


def hole_of(
    block_ids: Sequence[int], position: int, num_tokens: int, *, block_tokens: int
) -> int | None:
    """How many leading blocks of a chunk are not there (vLLM's null block, 0); None if it cannot be
    saved, since the rest is not whole."""
    first, end = position // block_tokens, -(-(position + num_tokens) // block_tokens)
    blocks = block_ids[first:end]
    hole = next((i for i, block in enumerate(blocks) if block), len(blocks))
    is_whole = len(blocks) == end - first and hole < len(blocks) and all(blocks[hole:])
    return hole if is_whole else None
