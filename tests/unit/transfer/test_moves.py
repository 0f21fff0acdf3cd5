# SPDX-License-Identifier: Apache-2.0
"""Plans of moved loads: each token of each piece once, from its place to its place."""

from __future__ import annotations

import numpy as np
import pytest

from attnstore_vllm.transfer.plan import (
    MovedRun,
    StoredTokens,
    moved_table,
    plan_moves,
)

BLOCK, CHUNK = 16, 64


def some_pieces(rng: np.random.Generator) -> tuple[list[StoredTokens], list[int]]:
    pieces, at = [], int(rng.integers(40))
    for slot in rng.permutation(20)[: int(rng.integers(1, 8))]:
        at += int(rng.integers(30)) if rng.random() < 0.5 else 0
        first = int(rng.integers(CHUNK))
        count = int(rng.integers(1, CHUNK - first + 1))
        position = int(rng.integers(5)) * CHUNK + first
        pieces.append(StoredTokens(int(slot), first, position, at, at + count))
        at += count
    blocks = -(-at // BLOCK) + int(rng.integers(3))
    return pieces, [int(block) for block in rng.permutation(1000)[:blocks]]


@pytest.mark.parametrize("seed", range(100))
def test_each_token_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces, block_ids = some_pieces(rng)
    wanted = {
        (block_ids[at // BLOCK], at % BLOCK): (slot, first + at - start, start - position)
        for slot, first, position, start, stop in pieces
        for at in range(start, stop)
    }
    runs = plan_moves(pieces, block_ids, block_tokens=BLOCK, chunk_tokens=CHUNK)
    found = {
        (run.block_id, run.within + i): (run.slot, run.first + i, run.shift)
        for run in runs
        for i in range(run.num_tokens)
    }
    assert found == wanted
    assert sum(run.num_tokens for run in runs) == len(wanted)
    assert all(run.within + run.num_tokens <= BLOCK for run in runs)
    # No more runs than there have to be: a piece touches so many blocks.
    assert len(runs) == sum(-(-p.stop // BLOCK) - p.start // BLOCK for p in pieces)


def test_the_table_has_the_fields_in_their_order() -> None:
    runs = plan_moves(
        [StoredTokens(7, 5, 133, 10, 30)], [50, 60], block_tokens=BLOCK, chunk_tokens=CHUNK
    )
    assert runs == (MovedRun(7, 5, 6, 50, 10, -123), MovedRun(7, 11, 14, 60, 0, -123))
    assert moved_table(runs).tolist() == [[7, 5, 6, 50, 10, -123], [7, 11, 14, 60, 0, -123]]
    assert moved_table([]).shape == (0, 6)


@pytest.mark.parametrize(
    "pieces",
    [
        [StoredTokens(0, 0, 0, 5, 5)],  # no tokens
        [StoredTokens(0, 60, 0, 0, 5)],  # beyond its chunk
        [StoredTokens(0, -1, 0, 0, 5)],
        [StoredTokens(0, 0, -1, 0, 5)],
        [StoredTokens(0, 0, 0, 30, 33)],  # beyond the blocks
        [StoredTokens(0, 0, 0, 3, 9), StoredTokens(1, 0, 0, 8, 12)],  # at one place
    ],
    ids=str,
)
def test_pieces_that_make_no_sense(pieces: list[StoredTokens]) -> None:
    with pytest.raises(AssertionError):
        plan_moves(pieces, [1, 2], block_tokens=BLOCK, chunk_tokens=CHUNK)
