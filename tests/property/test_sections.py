# SPDX-License-Identifier: Apache-2.0
"""How far a hit has what every KV cache group needs: against all lengths, tried one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece, PrefixIndex
from attnstore_vllm.index.sections import Need, Reach, fit, walk
from attnstore_vllm.scheduler.saving import name_up_to
from tests.helpers import sequence_of

CHUNK = 8
NUM_CHUNKS = 6
TENANT = bytes(32)
REACHES = st.one_of(
    st.tuples(st.just(Reach.WINDOW), st.sampled_from([2, 3, 5, 8, 9, 16, 17])),
    st.tuples(st.just(Reach.LOCAL), st.sampled_from([4, 8, 16])),
    st.tuples(st.just(Reach.FULL), st.just(0)),
)


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[Need], int, dict[tuple[int, int], tuple[int, int]]]:
    """Groups, the tokens of a prompt, and what is stored of each chunk in each group: so many
    leading blocks are a hole, and it ends after so many tokens."""
    needs = []
    for group in range(1, 1 + draw(st.integers(1, 3))):
        reach, tokens = draw(REACHES)
        needs.append(Need(group, reach, tokens, draw(st.sampled_from([2, 4]))))
    num_tokens = draw(st.integers(1, NUM_CHUNKS * CHUNK))
    stored: dict[tuple[int, int], tuple[int, int]] = {}
    for number in range(-(-num_tokens // CHUNK)):
        size = min(CHUNK, num_tokens - number * CHUNK)
        for group, block in [(0, CHUNK), *((need.group, need.block_tokens) for need in needs)]:
            if draw(st.integers(0, 7)) == 0:
                continue
            hole = draw(st.sampled_from([0, 0, 0, 1])) if group else 0
            if hole * block < size:
                stored[number, group] = hole, size
    return needs, num_tokens, stored


def filled(
    sequence: SequenceKeys, stored: dict[tuple[int, int], tuple[int, int]]
) -> tuple[PrefixIndex, list[Chunk]]:
    index, chunks = PrefixIndex(CHUNK, grain=1), []
    for (number, group), (hole, size) in stored.items():
        keys = sequence.section(group, hole) if group else sequence
        name = name_up_to(keys, number, TENANT, number * CHUNK + size)
        chunks.append(Chunk(name, dram=InTier(State.READY)))
        index.add(chunks[-1])
    return index, chunks


def is_backed(
    needs: list[Need], stored: dict[tuple[int, int], tuple[int, int]], start: int, stop: int
) -> bool:
    """Whether each token that a group needs of [start, stop) is in what is stored."""
    spine = [] if needs and needs[0].group == 0 else [Need(0, Reach.FULL, 0, CHUNK)]
    for need in [*spine, *needs]:
        if need.reach is Reach.WINDOW:
            first = stop - need.reach_tokens + 1
        elif need.reach is Reach.LOCAL:
            first = stop // need.reach_tokens * need.reach_tokens
        else:
            first = 0
        for token in range(max(start, first), stop):
            found = stored.get((token // CHUNK, need.group))
            if found is None:
                return False
            hole, size = found
            if not hole * need.block_tokens <= token % CHUNK < size:
                return False
    return True


@given(stores(), st.integers(0, 3), st.data())
@settings(max_examples=400)
def test_the_farthest_length_that_all_groups_back(
    case: tuple[list[Need], int, dict[tuple[int, int], tuple[int, int]]],
    local: int,
    data: st.DataObject,
) -> None:
    needs, num_tokens, stored = case
    start = local * CHUNK
    stop = data.draw(st.integers(0, num_tokens))
    sequence = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    index, _kept = filled(sequence, stored)
    spine = index.match(sequence, start, stop)
    found = fit(index, sequence, needs, spine, start, lambda _: True)
    reached = max((p.stop for p in found if p.group == 0), default=start)
    wanted = [end for end in range(start, stop + 1) if is_backed(needs, stored, start, end)]
    assert reached == max(wanted, default=start)
    for need in needs:
        check_pieces([p for p in found if p.group == need.group], need, start, reached)


@given(stores(), st.integers(CHUNK, 3 * CHUNK), st.integers(0, 3), st.data())
@settings(max_examples=400)
def test_the_farthest_length_where_the_spine_is_a_window(
    case: tuple[list[Need], int, dict[tuple[int, int], tuple[int, int]]],
    window: int,
    local: int,
    data: st.DataObject,
) -> None:
    others, num_tokens, stored = case
    needs = [Need(0, Reach.WINDOW, window, 4), *others[: data.draw(st.integers(0, 2))]]
    start = local * CHUNK
    stop = data.draw(st.integers(0, num_tokens))
    sequence = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    index, _kept = filled(sequence, stored)
    found = walk(index, sequence, needs, start, stop, lambda _: True)
    reached = found[-1].stop if found else start
    wanted = [end for end in range(start, stop + 1) if is_backed(needs, stored, start, end)]
    # Where no group needs a token no chunk lets a hit end.
    ends = [end for end in wanted if (((end - 1) // CHUNK), 0) in stored]
    assert reached == max(ends, default=start)
    for need in needs:
        check_pieces([p for p in found if p.group == need.group], need, start, reached)


@given(st.integers(1, NUM_CHUNKS * CHUNK), st.sets(st.integers(0, NUM_CHUNKS)), st.data())
def test_a_walk_ends_where_hits_may(num_tokens: int, lost: set[int], data: st.DataObject) -> None:
    """At whole blocks of what is stored, or at its end (index/stops.py)."""
    sequence = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    index = PrefixIndex(CHUNK, grain=4)
    chunks = []
    for first in range(0, num_tokens, CHUNK):
        if first // CHUNK not in lost:
            end = min(num_tokens, first + CHUNK)
            name = name_up_to(sequence, first // CHUNK, TENANT, end)
            chunks.append(Chunk(name, dram=InTier(State.READY)))
            index.add(chunks[-1])
    stop = data.draw(st.integers(0, num_tokens))
    needs = [Need(0, Reach.WINDOW, CHUNK + 3, 4)]
    found = walk(index, sequence, needs, 0, stop, lambda _: True)
    reached = found[-1].stop if found else 0
    assert reached % 4 == 0 or reached == num_tokens
    assert sequence.spine_stop >= reached
    assert not lost & {piece.start // CHUNK for piece in found}


def check_pieces(pieces: list[Piece], need: Need, start: int, stop: int) -> None:
    """They follow each other from what is needed to the end."""
    if not pieces:
        assert max(start, need.first(stop)) >= stop
        return
    assert pieces[0].start == max(start, need.first(stop))
    assert pieces[-1].stop == stop
    assert all(a.stop == b.start for a, b in pairwise(pieces))


def test_a_section_that_may_not_be_used_is_none() -> None:
    needs = [Need(1, Reach.WINDOW, 5, 4)]
    stored = {(n, g): (0, CHUNK) for n in range(3) for g in range(2)}
    sequence = sequence_of(list(range(25)), chunk_tokens=CHUNK)
    index, kept = filled(sequence, stored)
    spine = index.match(sequence, 0, 24)
    last = index.get(sequence.section(1, 0).key(2))
    assert last in kept
    found = fit(index, sequence, needs, spine, 0, lambda chunk: chunk is not last)
    assert [p.stop for p in found if p.group == 0] == [8, 16]


@pytest.mark.parametrize("group", [1, 2])
def test_groups_and_holes_have_names_of_their_own(group: int) -> None:
    sequence = sequence_of(list(range(16)), chunk_tokens=CHUNK)
    keys = [sequence.key(1), *(sequence.section(group, hole).key(1) for hole in range(3))]
    assert len({*keys, sequence.section(3 - group, 0).key(1)}) == 5
