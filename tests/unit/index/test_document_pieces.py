# SPDX-License-Identifier: Apache-2.0
"""Pieces of documents behind KV in its place, of which a sketch told too little."""

from __future__ import annotations

import itertools

import pytest

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece, ready_run
from attnstore_vllm.types import Key

SIZE, GRAIN = 256, 16
PROMPT = list(range(1000, 1400))
ROOT = Key(b"r" * 32)


def ready(tokens: list[int]) -> Chunk:
    name = SequenceKeys(ROOT, tokens, SIZE).name(0, bytes(32))
    return Chunk(name, dram=InTier(State.READY, 0))


@pytest.mark.parametrize("start", [96, 110, 130])
def test_a_document_begins_where_what_is_in_its_place_ends(start: int) -> None:
    """The first chunk has 120 tokens of the prompt. Its sketch told 96, and then it was read."""
    in_place = ready([*PROMPT[:120], *range(SIZE - 120)])
    document = ready([*range(40), *PROMPT[start:], *range(SIZE)][:SIZE])
    stop = start + 200
    pieces = [
        Piece(in_place, 0, 96, exact=False, grain=1),
        Piece(document, start, stop, first=40, tokens=document.name.tokens, gap=True),
    ]
    found, _ = ready_run(pieces, SequenceKeys(ROOT, PROMPT, SIZE), len(PROMPT), GRAIN)
    assert len(found) == 2 and found[0].stop == 120
    assert all(a.stop <= b.start for a, b in itertools.pairwise(found)), "no token is there twice"
    assert found[1].gap and found[1].start == max(start, 120)
    assert found[1].first == 40 + found[1].start - start
