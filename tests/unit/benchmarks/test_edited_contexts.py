# SPDX-License-Identifier: Apache-2.0
"""The edits of benchmarks.edited_contexts, and what is found of them."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.edited_contexts import BLOCK, edited, found_by, words

BLOCKS = list(range(400))


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_keeps_what_it_says(seed: int) -> None:
    before, after, kept = edited(3, BLOCKS, Random(seed))
    assert before == [token for block in BLOCKS for token in words(3, block)]
    first = next(n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    behind = {tuple(words(3, block)) for block in BLOCKS}
    blocks = 0
    at = first // BLOCK * BLOCK
    while at + BLOCK <= len(after):
        is_kept = tuple(after[at : at + BLOCK]) in behind
        blocks, at = blocks + is_kept, at + (BLOCK if is_kept else 1)
    assert blocks * BLOCK == kept


def test_what_follows_deleted_runs_is_found_as_documents_alone() -> None:
    before, after, kept = edited(3, BLOCKS, Random(1))
    first = next(n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    behind = {
        kind: sum(
            p.stop - max(p.start, first) for p in found_by(kind, before, after) if p.stop > first
        )
        for kind in ("prefix", "documents")
    }
    assert behind["prefix"] == 0
    assert behind["documents"] >= 0.9 * kept
