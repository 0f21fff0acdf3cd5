# SPDX-License-Identifier: Apache-2.0
"""The copies that workers are to make, decided on the scheduler side. The workers only obey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.transfer.moves import MovedRun


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
    """Of a save: the blocks are others' from the next step on, so it is made in this one, or given
    up."""

    def __post_init__(self) -> None:
        assert not self.is_empty, "an empty plan is a caller's bug: do not send it"

    @property
    def is_empty(self) -> bool:
        return not self.copies

    @property
    def num_blocks(self) -> int:
        return sum(len(copy.block_ids) for copy in self.copies)


@dataclass(frozen=True, slots=True)
class LoadPlan(TransferPlan):
    """Blocks that are filled from slots."""

    num_partial: int = 0
    """So many blocks at the end of the copies are partly filled: they receive new tokens."""
    layers_before: int = 0
    """0: for this step's forward pass. Else ahead of it: received when so many layers are there."""
    moves: tuple[MovedRun, ...] = ()
    """Token by token, after the copies; complete before the forward pass."""

    @property
    def is_empty(self) -> bool:
        return not (self.copies or self.moves)


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
) -> tuple[ChunkCopy, ...]:
    """The copies that fill a request's blocks of one group with the KV of its tokens [start, stop).

    Whole blocks are copied; what a last, partly filled block has beyond `stop` is overwritten
    by the request's own tokens before anything reads it.

    Args:
        slots: (slot, first token, end token) of the chunks, in order, covering [start, stop).
        block_ids: the request's blocks from its token 0 on.
        start: a multiple of block_tokens, since vLLM's own hits end on a block.
    """
    assert start % block_tokens == 0
    assert start < stop
    copies: list[ChunkCopy] = []
    token = start
    for slot, first, last in slots:
        assert first <= token < last, "the chunks do not follow each other"
        block, end = token // block_tokens, -(-min(last, stop) // block_tokens)
        within = token % chunk_tokens // block_tokens
        assert len(block_ids) >= end
        copies.append(ChunkCopy(slot, within, tuple(block_ids[block:end])))
        token = end * block_tokens
    assert token >= stop, "the chunks end before the tokens do"
    return tuple(copies)


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
) -> tuple[ChunkCopy, ...]:
    """The copies that fill a chunk's slot from a request's blocks of one group.

    Args:
        position: the chunk's first token, a multiple of the chunk's size.
        num_tokens: how many tokens it has; the last block may be partly filled.
        hole: leading blocks of it that are not there (index/sections.py).
    """
    first = position // block_tokens
    num_blocks = -(-num_tokens // block_tokens)
    assert len(block_ids) >= first + num_blocks
    return (ChunkCopy(slot, hole, tuple(block_ids[first + hole : first + num_blocks])),)


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
