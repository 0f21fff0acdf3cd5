# SPDX-License-Identifier: Apache-2.0
"""What the workers are to copy, decided on the scheduler side. The workers only obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PageCopy(NamedTuple):
    """One block of a chunk and one block of HBM; every layer of it is copied."""

    slot: int
    """The chunk's DRAM slot."""
    block_in_chunk: int
    block_id: int
    """vLLM's block."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Copies in one direction that complete together, on every rank."""

    plan_id: int
    copies: tuple[PageCopy, ...]

    def __post_init__(self) -> None:
        assert self.copies, "an empty plan is a caller's bug: do not send it"


def plan_load(
    slots: Sequence[tuple[int, int, int]],
    block_ids: Sequence[int],
    start: int,
    stop: int,
    *,
    block_tokens: int,
    chunk_tokens: int,
) -> tuple[PageCopy, ...]:
    """The copies that fill a request's blocks with the KV of its tokens [start, stop).

    Whole blocks are copied; what a last, partly filled block has beyond `stop` is overwritten
    by the request's own tokens before anything reads it.

    Args:
        slots: (slot, first token, end token) of the chunks, in order, covering [start, stop).
        block_ids: the request's blocks from its token 0 on.
        start: a multiple of block_tokens, since vLLM's own hits end on a block.
    """
    assert start % block_tokens == 0
    assert start < stop
    copies: list[PageCopy] = []
    token = start
    for slot, first, last in slots:
        assert first <= token < last, "the chunks do not follow each other"
        while token < min(last, stop):
            within = token % chunk_tokens // block_tokens
            copies.append(PageCopy(slot, within, block_ids[token // block_tokens]))
            token += block_tokens
    assert token >= stop, "the chunks end before the tokens do"
    return tuple(copies)


def plan_save(
    slot: int,
    block_ids: Sequence[int],
    position: int,
    num_tokens: int,
    *,
    block_tokens: int,
) -> tuple[PageCopy, ...]:
    """The copies that fill a chunk's slot from a request's blocks.

    Args:
        position: the chunk's first token, a multiple of the chunk's size.
        num_tokens: how many tokens it has; the last block may be partly filled.
    """
    first = position // block_tokens
    num_blocks = -(-num_tokens // block_tokens)
    return tuple(PageCopy(slot, i, block_ids[first + i]) for i in range(num_blocks))
