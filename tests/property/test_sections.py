# SPDX-License-Identifier: Apache-2.0
"""How far a hit has what every KV cache group needs: against all lengths, tried one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece, PrefixIndex
from attnstore_vllm.index.sections import Need, Reach, backed, fit, proven, walk
from tests.helpers import sequence_of

CHUNK = 8
NUM_CHUNKS = 6
TENANT = bytes(32)
Stored = dict[tuple[int, int], tuple[int, int]]
"""By chunk and group: leading blocks that are not there, and tokens up to which it goes."""
REACHES = st.one_of(
    st.tuples(st.just(Reach.WINDOW), st.sampled_from([2, 3, 5, 8, 9, 16, 17])),
    st.tuples(st.just(Reach.LOCAL), st.sampled_from([4, 8, 16])),
    st.tuples(st.just(Reach.FULL), st.just(0)),
)


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[Need], int, Stored]:
    """Groups, the tokens of a prompt, and what is stored of each chunk in each group: so many
    leading blocks are a hole, and it ends after so many tokens."""
    needs = []
    for group in range(1, 1 + draw(st.integers(1, 3))):
        reach, tokens = draw(REACHES)
        needs.append(Need(group, reach, tokens, draw(st.sampled_from([2, 4]))))
    num_tokens = draw(st.integers(1, NUM_CHUNKS * CHUNK))
    stored: Stored = {}
    for number in range(-(-num_tokens // CHUNK)):
        size = min(CHUNK, num_tokens - number * CHUNK)
        for group, block in [(0, CHUNK), *((need.group, need.block_tokens) for need in needs)]:
            if draw(st.integers(0, 7)) == 0:
                continue
            hole = draw(st.sampled_from([0, 0, 0, 1])) if group else 0
            if hole * block < size:
                stored[number, group] = hole, size
    return needs, num_tokens, stored


def filled(sequence: SequenceKeys, stored: Stored) -> tuple[PrefixIndex, list[Chunk]]:
    index, chunks = PrefixIndex(CHUNK, grain=1), []
    for (number, group), (hole, size) in stored.items():
        keys = sequence.section(group, hole) if group else sequence
        name = keys.name_up_to(number, TENANT, number * CHUNK + size)
        chunks.append(Chunk(name, dram=InTier(State.READY)))
        index.add(chunks[-1])
    return index, chunks


def is_in(stored: Stored, group: int, block_tokens: int, token: int) -> bool:
    """Whether a group's section has this token."""
    found = stored.get((token // CHUNK, group))
    return found is not None and found[0] * block_tokens <= token % CHUNK < found[1]


def first_needed(need: Need, stop: int) -> int:
    """The first token that the group's layers look at when token `stop` is computed."""
    if need.reach is Reach.WINDOW:
        return min(stop, max(0, stop - need.reach_tokens + 1))
    if need.reach is Reach.LOCAL:
        return stop // need.reach_tokens * need.reach_tokens
    return 0


def is_backed(needs: list[Need], stored: Stored, start: int, stop: int) -> bool:
    """Whether each token that a group needs of [start, stop) is in what is stored."""
    spine = [] if needs and needs[0].group == 0 else [Need(0, Reach.FULL, 0, CHUNK)]
    for need in [*spine, *needs]:
        if not all(
            is_in(stored, need.group, need.block_tokens, token)
            for token in range(max(start, first_needed(need, stop)), stop)
        ):
            return False
    return True


@given(stores(), st.integers(0, 3), st.data())
@settings(max_examples=400)
def test_the_farthest_length_that_all_groups_back(
    case: tuple[list[Need], int, Stored],
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
    found, _ = walk(index, sequence, needs, start, stop, lambda _: True)
    reached = found[-1].stop if found else start
    wanted = [end for end in range(start, stop + 1) if is_backed(needs, stored, start, end)]
    # Where no group needs a token no chunk lets a hit end.
    ends = [end for end in wanted if (((end - 1) // CHUNK), 0) in stored]
    assert reached == max(ends, default=start)
    for need in needs:
        check_pieces([p for p in found if p.group == need.group], need, start, reached)


@given(stores(), st.sampled_from([1, 2, 3]), st.integers(0, 3), st.booleans(), st.data())
@settings(max_examples=400)
def test_what_hangs_on_tokens_that_differ_is_not_offered(
    case: tuple[list[Need], int, Stored],
    ahead: int,
    local: int,
    has_spine: bool,
    data: st.DataObject,
) -> None:
    """KV of a token that is made of the next ones too. All that is stored is of one sequence, so it
    is right as far as those are the same; whole chunks are taken to be followed by them."""
    needs, num_tokens, stored = case
    if not has_spine:
        needs = [Need(0, Reach.WINDOW, 2 * CHUNK, 4), *needs[:1]]
    needs = [replace(need, ahead=ahead) for need in needs]
    for place, (hole, size) in stored.items():
        if place[1] and data.draw(st.booleans()):  # a section that ends before the spine does
            stored[place] = hole, data.draw(st.integers(min(size, 4 * hole + 1), size))
    shared = data.draw(st.integers(0, num_tokens))
    source = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    request = sequence_of([*range(shared), *range(1_000, 1_020)], chunk_tokens=CHUNK)
    index, _kept = filled(source, stored)
    start, stop = local * CHUNK, shared + 20
    if has_spine:
        matched = index.match(request, start, stop)
        far = matched[-1].stop if matched else start
        found = fit(index, request, needs, proven(matched, ahead, 1), start, lambda _: True)
    else:
        found, far = walk(index, request, needs, start, stop, lambda _: True)
    reached = max((p.stop for p in found if p.group == 0), default=start)

    def backs(end: int) -> bool:
        if end + ahead > far or not is_backed(needs, stored, start, end):
            return end == start
        for need in needs:
            if max(start, first_needed(need, end)) < end and end % CHUNK:
                first = end // CHUNK * CHUNK
                known = min(shared, first + stored[end // CHUNK, need.group][1])
                if known < first + CHUNK and end + ahead > known:
                    return False
        return has_spine or end == start or ((end - 1) // CHUNK, 0) in stored

    assert reached == max(end for end in range(start, max(start, far) + 1) if backs(end))


@given(st.integers(1, NUM_CHUNKS * CHUNK), st.sets(st.integers(0, NUM_CHUNKS)), st.data())
def test_a_walk_ends_where_hits_may(num_tokens: int, lost: set[int], data: st.DataObject) -> None:
    """At whole blocks of what is stored, or at its end (index/prefix.py)."""
    sequence = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    index = PrefixIndex(CHUNK, grain=4)
    chunks = []
    for first in range(0, num_tokens, CHUNK):
        if first // CHUNK not in lost:
            end = min(num_tokens, first + CHUNK)
            name = sequence.name_up_to(first // CHUNK, TENANT, end)
            chunks.append(Chunk(name, dram=InTier(State.READY)))
            index.add(chunks[-1])
    stop = data.draw(st.integers(0, num_tokens))
    needs = [Need(0, Reach.WINDOW, CHUNK + 3, 4)]
    found, spine_stop = walk(index, sequence, needs, 0, stop, lambda _: True)
    reached = found[-1].stop if found else 0
    assert reached % 4 == 0 or reached == num_tokens
    assert spine_stop >= reached
    assert not lost & {piece.start // CHUNK for piece in found}


def check_pieces(pieces: list[Piece], need: Need, start: int, stop: int) -> None:
    """They follow each other from what is needed to the end."""
    if not pieces:
        assert max(start, need.first(stop)) >= stop
        return
    assert pieces[0].start == max(start, need.first(stop))
    assert pieces[-1].stop == stop
    assert all(a.stop == b.start for a, b in pairwise(pieces))


def moved_pieces(
    index: PrefixIndex, source: SequenceKeys, stored: Stored, cut: tuple[int, int], start: int
) -> list[Piece]:
    """The source's tokens from `cut[0]` to `cut[1]`, moved to `start`, as far as the spine is
    stored."""
    pieces, (at, stop) = [], cut
    while at < stop:
        number = at // CHUNK
        size = stored.get((number, 0), (0, 0))[1]
        end = min(stop, number * CHUNK + size)
        if end <= at:
            break
        chunk = index.get(source.name_up_to(number, TENANT, number * CHUNK + size).key)
        assert chunk is not None
        first, length = at - number * CHUNK, end - at
        pieces.append(Piece(chunk, start, start + length, first=first, tokens=chunk.name.tokens))
        start, at = start + length, end
        if size < CHUNK:
            break
    return pieces


@given(stores(), st.integers(0, 2), st.data())
@settings(max_examples=400)
def test_the_farthest_length_with_moved_tokens(
    case: tuple[list[Need], int, Stored], local: int, data: st.DataObject
) -> None:
    """A prompt keeps the source's first tokens in their place, and moves others behind them."""
    needs, num_tokens, stored = case
    source = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    index, _kept = filled(source, stored)
    placed = data.draw(st.integers(0, num_tokens))
    cut = data.draw(st.integers(placed, num_tokens))
    places = [*range(placed), *range(cut, num_tokens)]
    request = sequence_of([*places, 10_001], chunk_tokens=CHUNK)
    start = min(local * CHUNK, placed)
    spine = index.match(request, start, placed, grain=1)
    if start == placed or (spine and spine[-1].stop == placed):
        spine += moved_pieces(index, source, stored, (cut, num_tokens), placed)
    found = fit(index, request, needs, spine, start, lambda _: True)
    reached = max((p.stop for p in found if p.group == 0), default=start)
    farthest = spine[-1].stop if spine else start

    def backs(stop: int) -> bool:
        return all(
            is_in(stored, need.group, need.block_tokens, places[token])
            for need in needs
            for token in range(max(start, first_needed(need, stop)), stop)
        )

    wanted = [end for end in range(start, farthest + 1) if backs(end)]
    assert reached == max(wanted, default=start)
    for need in needs:
        check_moved(found, need, places, start, reached)


def check_moved(found: list[Piece], need: Need, places: list[int], start: int, stop: int) -> None:
    """The group's pieces have all that it needs, and each is of the token that stands there."""
    pieces = [piece for piece in found if piece.group == need.group]
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    if max(start, first_needed(need, stop)) < stop:
        assert pieces[0].start <= max(start, first_needed(need, stop))
        assert pieces[-1].stop == stop
    for piece in pieces:
        origin = piece.chunk.name.position + piece.shift
        for token in range(piece.start, piece.stop):
            assert places[token] == piece.chunk.name.position + token - origin
        if piece.first is not None:
            assert piece.start >= first_needed(need, stop), "more than the window"


@pytest.mark.parametrize(("section_stop", "wanted"), [
    (64, [(0, 16)]),  # nothing of the moved chunk: what was to be followed ends at a whole block
    (113, [(0, 20), (20, 62)]),  # 49 of its tokens: three whole blocks of the source's
    (128, [(0, 20), (20, 78)]),
])  # fmt: skip
def test_a_shorter_hit_with_moved_tokens_ends_where_one_may(
    section_stop: int, wanted: list[tuple[int, int]]
) -> None:
    """Tokens 0 to 20 of the source in their place, 70 to 128 behind them; whole blocks of 16."""
    source = sequence_of(list(range(128)), chunk_tokens=64)
    index, chunks = PrefixIndex(64, grain=16), []
    ends = [(source, 64), (source, 128), (source.section(1, 0), 64)]
    if section_stop > 64:
        ends.append((source.section(1, 0), section_stop))
    for keys, stop in ends:
        name = keys.name_up_to((stop - 1) // 64, TENANT, stop)
        chunks.append(Chunk(name, dram=InTier(State.READY)))
        index.add(chunks[-1])
    request = sequence_of([*range(20), *range(70, 128), 10_001], chunk_tokens=64)
    moved = Piece(chunks[1], 20, 78, first=6, tokens=chunks[1].name.tokens)
    spine = [*index.match(request, 0, 20, grain=1), moved]
    found = fit(index, request, [Need(1, Reach.FULL, 0, 16)], spine, 0, lambda _: True)
    assert [(p.start, p.stop) for p in found if p.group == 0] == wanted
    assert [p.stop for p in found if p.group][-1:] == [wanted[-1][1]]


def test_a_state_does_not_go_with_moved_tokens() -> None:
    """Also if somebody has computed these very tokens, and only the state is left of it."""
    stored = {(n, g): (0, CHUNK) for n in range(4) for g in range(2)}
    source = sequence_of(list(range(32)), chunk_tokens=CHUNK)
    index, _kept = filled(source, stored)
    request = sequence_of([*range(8), *range(16, 32)], chunk_tokens=CHUNK)
    left = Chunk(request.section(1, 0).name_up_to(2, TENANT, 24), dram=InTier(State.READY))
    index.add(left)
    spine = index.match(request, 0, 8, grain=1) + moved_pieces(index, source, stored, (16, 32), 8)
    assert spine[-1].stop == 24
    found = fit(index, request, [Need(1, Reach.STATE, 0, CHUNK)], spine, 0, lambda _: True)
    assert [(p.group, p.stop) for p in found] == [(0, 8), (1, 8)]


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


@given(stores(), st.integers(0, 3), st.booleans(), st.data())
@settings(max_examples=400)
def test_a_shorter_part_of_an_offer_is_backed_or_it_is_not(
    case: tuple[list[Need], int, Stored], local: int, has_spine: bool, data: st.DataObject
) -> None:
    """vLLM takes any part of what was offered, from its first token on: against all tokens that
    each group needs of just that part."""
    needs, num_tokens, stored = case
    if not has_spine:
        needs = [Need(0, Reach.WINDOW, 2 * CHUNK, 4), *needs[:2]]
    start = local * CHUNK
    sequence = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    index, _kept = filled(sequence, stored)
    if has_spine:
        spine = index.match(sequence, start, num_tokens)
        offered = fit(index, sequence, needs, spine, start, lambda _: True)
    else:
        offered, _ = walk(index, sequence, needs, start, num_tokens, lambda _: True)
    lost = data.draw(st.sets(st.sampled_from(sorted(stored)) if stored else st.nothing()))
    gone = {n for n, (place, _) in enumerate(stored.items()) if place in lost and place[1]}
    left = {place: size for n, (place, size) in enumerate(stored.items()) if n not in gone}
    there = {id(chunk) for n, chunk in enumerate(_kept) if n not in gone}
    spine = [piece for piece in offered if piece.group == 0]
    for stop in range(start + 1, (offered[-1].stop if offered else start) + 1):
        part = backed(index, sequence, needs, spine, start, stop, lambda c: id(c) in there)
        assert bool(part) == is_backed(needs, left, start, stop), stop
        for need in needs if part else ():
            check_pieces([p for p in part if p.group == need.group], need, start, stop)


@given(st.sets(st.integers(1, NUM_CHUNKS * CHUNK), min_size=1), st.data())
def test_a_shorter_part_has_its_own_state(ends: set[int], data: st.DataObject) -> None:
    """A state backs the length that it is of, and no other."""
    num_tokens = max(ends)
    sequence = sequence_of(list(range(num_tokens)), chunk_tokens=CHUNK)
    firsts = range(0, num_tokens, CHUNK)
    stored = {(at // CHUNK, 0): (0, min(CHUNK, num_tokens - at)) for at in firsts}
    index, kept = filled(sequence, stored)
    for end in ends:
        name = sequence.section(1, 0).name_up_to((end - 1) // CHUNK, TENANT, end)
        kept.append(Chunk(name, dram=InTier(State.READY)))
        index.add(kept[-1])
    needs = [Need(1, Reach.STATE, 0, CHUNK)]
    spine = index.match(sequence, 0, num_tokens)
    offered = fit(index, sequence, needs, spine, 0, lambda _: True)
    spine = [piece for piece in offered if piece.group == 0]
    for stop in range(1, offered[-1].stop + 1):
        part = backed(index, sequence, needs, spine, 0, stop, lambda _: True)
        assert bool(part) == (stop in ends)
        assert [piece.stop for piece in part[-1:]] == ([stop] if part else [])
