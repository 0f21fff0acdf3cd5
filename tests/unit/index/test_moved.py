# SPDX-License-Identifier: Apache-2.0
"""Which stored KV a prompt gets at other positions: behind what is in its place, or anywhere."""

from __future__ import annotations

import math

import pytest

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.index.prefix import Piece, PrefixIndex, gaps_of
from tests.content_helpers import CHUNK, DOMAIN, numbered
from tests.helpers import names_of, sequence_of

MIN = 64
A, B = numbered(1_000, 200), numbered(5_000, 150)
HEAD = numbered(1, 2 * CHUNK)


class Rig:
    """What is stored: two documents, each behind a text of its own."""

    def __init__(self, *, sinks: int = 0, recompute: float = 0.0, recompute_last: int = 0) -> None:
        self.index = PrefixIndex(CHUNK, grain=1)
        self.moved = MovedKv(
            self.index, CHUNK, 1_000, min_tokens=MIN, sinks=sinks, seed=7, recompute=recompute,
            recompute_last=recompute_last,
        )  # fmt: skip
        self.chunks: list[Chunk] = []
        for number, document in enumerate((A, B)):
            self.store([*numbered(20_000 + 1_000 * number, 40 + 7 * number), *document])

    def store(self, tokens: list[int]) -> list[Chunk]:
        chunks = [
            Chunk(name, dram=InTier(State.READY))
            for name in names_of(sequence_of(tokens, None, CHUNK))
        ]
        for chunk in chunks:
            self.index.add(chunk)
            self.moved.note(chunk.name, DOMAIN, 0, is_exact=True)
        self.chunks += chunks
        return chunks

    def find(self, prompt: list[int], stop: int | None = None) -> list[Piece]:
        """As a look-up does that goes on behind what is in its place."""
        sequence = sequence_of(prompt, None, CHUNK)
        stop = len(prompt) if stop is None else stop
        placed = self.index.match(sequence, 0, stop)
        return self.moved.anywhere(placed, sequence, 0, stop)


def documents_of(pieces: list[Piece]) -> list[range]:
    runs: list[range] = []
    for piece in pieces:
        if piece.gap or not runs:
            runs.append(range(piece.start, piece.stop))
        else:
            assert piece.start == runs[-1].stop
            runs[-1] = range(runs[-1].start, piece.stop)
    return runs


PROMPT = [*numbered(40_000, 30), *B, *numbered(41_000, 20), *A, *numbered(42_000, 40)]
IN_B, IN_A = range(30, 180), range(200, 400)


def test_documents_in_another_order_with_gaps() -> None:
    pieces = Rig().find(PROMPT)
    found = documents_of(pieces)
    # The last tokens of a document are in a chunk that was not full, which is stored as it is.
    assert found == [IN_B, IN_A]
    assert gaps_of(pieces, 0, IN_A.stop) == [range(30), range(180, 200)]
    assert all(piece.first is not None for piece in pieces)


def test_behind_what_is_in_its_place() -> None:
    rig = Rig()
    rig.store([*HEAD, *numbered(9_000, CHUNK)])
    pieces = rig.find([*HEAD, *PROMPT])
    assert [piece.first for piece in pieces[:2]] == [None, None] and not pieces[0].gap
    moved = [piece for piece in pieces if piece.first is not None]
    assert documents_of(moved) == [
        range(run.start + len(HEAD), run.stop + len(HEAD)) for run in (IN_B, IN_A)
    ]


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_first_tokens_of_each_are_computed_anew(share: float) -> None:
    found = documents_of(Rig(recompute=share).find(PROMPT))
    first = [math.ceil(share * len(run)) for run in (IN_B, IN_A)]
    assert found == [
        range(IN_B.start + first[0], IN_B.stop), range(IN_A.start + first[1], IN_A.stop),
    ]  # fmt: skip


def test_all_of_each_computed_anew_is_none() -> None:
    assert Rig(recompute=1.0).find(PROMPT) == []


def test_the_last_tokens_are_computed_anew() -> None:
    assert documents_of(Rig(recompute_last=50).find(PROMPT)) == [IN_B, IN_A[:-50]]
    assert documents_of(Rig(recompute_last=len(A)).find(PROMPT)) == [IN_B]
    rig = Rig(recompute_last=50)
    prompt = [*A[10:], *numbered(42_000, 40)]
    (cut,) = documents_of(rig.moved.go_on([], sequence_of(prompt, None, CHUNK), 0, len(prompt)))
    assert cut == range(len(A) - 10 - 50)


def test_a_prompt_without_its_first_tokens_in_place_keeps_the_sinks() -> None:
    found = documents_of(Rig(sinks=64).find(PROMPT))
    assert found[0].start >= 64 and found[-1] == IN_A


def test_only_whole_chunks_that_are_there() -> None:
    rig = Rig()
    (gone,) = [
        chunk for chunk in rig.chunks if chunk.name.tokens.startswith(encode_tokens(A[24:40]))
    ]
    rig.index.remove(gone)
    found = documents_of(rig.find(PROMPT))
    assert IN_B in found
    assert sum(map(len, found)) < len(IN_B) + len(IN_A)


def test_of_one_domain_alone() -> None:
    rig = Rig()
    sequence = sequence_of(PROMPT, "another", CHUNK)
    assert rig.moved.anywhere([], sequence, 0, len(PROMPT)) == []
