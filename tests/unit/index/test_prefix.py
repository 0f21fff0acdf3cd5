# SPDX-License-Identifier: Apache-2.0
"""The prefix index: the longest stored prefix, found among any number of siblings.

Most of it with hits that may end at any token (`grain=1`), which shows most; where they may end is
looked at further below, and in tests/property/test_stops.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnstore_vllm.index.chunk import Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import chunk_key, encode_tokens, root_key
from attnstore_vllm.index.prefix import (
    GRAIN_TOKENS,
    NEIGHBOURS_MAX,
    PrefixIndex,
    common_tokens,
    kept_end,
    stop_in,
    whole_blocks,
)
from attnstore_vllm.tiers.nvme.format import Header
from attnstore_vllm.types import NVME, TOKEN_BYTES, Key
from tests.helpers import CHUNK_TOKENS, NAMESPACE, name_of, sequence_of, tokens_of

ROOT = root_key(NAMESPACE, None, b"")
# Few values, so that prefixes are shared; large ones, so that signed or little-endian order shows.
TOKEN = st.sampled_from([0, 1, 255, 256, 65536, 2**31, 2**32 - 1])
TOKEN_LISTS = st.lists(TOKEN, min_size=1, max_size=6)


def ready(name: ChunkName) -> Chunk:
    return Chunk(name, dram=InTier(State.READY))


def child(tokens: list[int], parent: Key = ROOT, extra: bytes = b"") -> ChunkName:
    encoded = encode_tokens(tokens)
    key = chunk_key(parent, extra, encoded)
    return ChunkName(key, parent, extra, bytes(32), 0, len(tokens), encoded)


def filled(
    token_lists: list[list[int]], chunk_tokens: int = CHUNK_TOKENS
) -> tuple[PrefixIndex, dict[bytes, Chunk]]:
    """An index, and its chunks by their tokens; they are in it as long as these are referred to."""
    index, chunks = PrefixIndex(chunk_tokens, grain=1), {}
    for tokens in token_lists:
        name = child(tokens)
        if name.tokens not in chunks:
            chunks[name.tokens] = ready(name)
            index.add(chunks[name.tokens])
    return index, chunks


def shared(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(TOKEN_LISTS, TOKEN_LISTS)
def test_common_tokens(a: list[int], b: list[int]) -> None:
    assert common_tokens(encode_tokens(a), encode_tokens(b)) == shared(a, b)


@given(st.lists(TOKEN_LISTS, max_size=30), TOKEN_LISTS)
@example([[256, 1], [1, 256]], [255, 1])
@settings(max_examples=400)
def test_best_match_is_the_longest_common_prefix(known: list[list[int]], wanted: list[int]) -> None:
    index, _chunks = filled(known)
    longest = max((shared(tokens, wanted) for tokens in known), default=0)
    best = index.best_match(ROOT, b"", encode_tokens(wanted))
    if longest == 0:
        assert best is None
    else:
        assert best is not None
        chunk, length, exact = best
        assert exact
        assert length == longest
        assert chunk.name.tokens.startswith(encode_tokens(wanted)[: length * TOKEN_BYTES])


@given(st.lists(TOKEN_LISTS, max_size=20), TOKEN_LISTS)
def test_extends_and_extended_by(known: list[list[int]], wanted: list[int]) -> None:
    index, _chunks = filled(known)
    name = child(wanted)
    others = [tokens for tokens in known if tokens != wanted]
    longer = [tokens for tokens in others if tokens[: len(wanted)] == wanted]
    assert index.extends(name) == bool(longer)
    found = {chunk.name.tokens for chunk in index.extended_by(name)}
    tails = {encode_tokens(t) for t in others if wanted[: len(t)] == t}
    assert found == tails


@given(st.lists(TOKEN_LISTS, max_size=20), st.randoms(use_true_random=False))
def test_what_is_removed_is_not_found(known: list[list[int]], rng: object) -> None:
    index, chunks = filled(known)
    left = sorted(chunks)
    rng.shuffle(left)  # type: ignore[attr-defined]
    for tokens in left:
        chunk = chunks[tokens]
        assert index.get(chunk.name.key) is chunk
        best = index.best_match(ROOT, b"", tokens)
        assert best == (chunk, len(tokens) // TOKEN_BYTES, True)
        index.remove(chunk)
        assert index.get(chunk.name.key) is None
        best = index.best_match(ROOT, b"", tokens)
        assert best is None or best[0] is not chunk
    assert len(index) == 0


def test_siblings_of_another_parent_or_image_are_not_found() -> None:
    index = PrefixIndex(CHUNK_TOKENS, grain=1)
    image = b"i" * 32
    chunk = ready(child([1, 2, 3], extra=image))
    index.add(chunk)
    tokens = encode_tokens([1, 2, 3])
    assert index.best_match(ROOT, b"", tokens) is None
    assert index.best_match(Key(bytes(32)), image, tokens) is None
    assert index.best_match(ROOT, image, tokens) is not None
    assert not index.extends(child([1, 2]))
    assert not index.extended_by(child([1, 2, 3, 4]))


def test_a_chunk_that_cannot_be_loaded_is_no_match() -> None:
    index = PrefixIndex(CHUNK_TOKENS, grain=1)
    saving = Chunk(child([1, 2, 3]), dram=InTier(State.SAVING))
    index.add(saving)
    assert index.best_match(ROOT, b"", encode_tokens([1, 2, 3])) is None
    saving.dram.state = State.READY
    assert index.best_match(ROOT, b"", encode_tokens([1, 2, 9])) == (saving, 2, True)


def test_of_equal_matches_one_of_known_tokens_is_better() -> None:
    wanted = encode_tokens([1, 2, 3, 4, 5, 6])
    for seed in range(16):  # the order of the two among their siblings
        index = PrefixIndex(CHUNK_TOKENS, seed, grain=1)
        known = ready(child([1, 2, 3, 4, 9]))
        index.add(known)
        at_rest = InTier(State.READY, 0, bytes(16))
        elsewhere = Chunk(child([1, 2, 3, 4, 8, 8]), behind={NVME: at_rest})
        index.add(elsewhere)
        del elsewhere  # now an entry, whose tokens nobody knows
        assert index.best_match(ROOT, b"", wanted) == (known, 4, True)


def test_a_whole_chunk_is_extended_by_none() -> None:
    whole = child(tokens_of(1, CHUNK_TOKENS))
    index, _chunks = filled([tokens_of(1, CHUNK_TOKENS)])
    assert not index.extends(whole)
    assert index.extended_by(whole) == []


def test_superseding_looks_at_a_bounded_number_of_neighbours() -> None:
    tails = [[7] * (n + 1) for n in range(2 * NEIGHBOURS_MAX)]
    index, _chunks = filled(tails, chunk_tokens=256)
    assert len(index.extended_by(child([7] * (2 * NEIGHBOURS_MAX + 1)))) == NEIGHBOURS_MAX


def stored(num_tokens: int) -> tuple[PrefixIndex, list[Chunk]]:
    """An index that holds one conversation, whole chunks of 16 and a tail."""
    sequence, index = sequence_of(tokens_of(1, num_tokens)), PrefixIndex(CHUNK_TOKENS, grain=1)
    chunks = [ready(name_of(sequence, n)) for n in range(-(-num_tokens // 16))]
    for chunk in chunks:
        index.add(chunk)
    return index, chunks


def runs(index: PrefixIndex, tokens: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    pieces = index.match(sequence_of(tokens), start, stop)
    return [(piece.start, piece.stop) for piece in pieces]


def test_match_whole_chunks_and_a_tail() -> None:
    index, chunks = stored(40)
    pieces = index.match(sequence_of(tokens_of(1, 60)), 0, 60)
    assert [piece.chunk for piece in pieces] == chunks
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 16), (16, 32), (32, 40)]


def test_match_ends_where_the_tokens_part() -> None:
    index, _chunks = stored(48)
    tokens = tokens_of(1, 48)
    tokens[20] = 9
    assert runs(index, tokens, 0, 48) == [(0, 16), (16, 20)]
    tokens[0] = 9
    assert runs(index, tokens, 0, 48) == []


def test_match_stops_at_stop() -> None:
    index, _chunks = stored(48)
    assert runs(index, tokens_of(1, 48), 0, 47) == [(0, 16), (16, 32), (32, 47)]
    assert runs(index, tokens_of(1, 48), 0, 16) == [(0, 16)]
    assert runs(index, tokens_of(1, 48), 0, 5) == [(0, 5)]
    assert runs(index, tokens_of(1, 48), 5, 5) == []


def test_match_from_the_middle_does_not_need_what_is_before() -> None:
    index, chunks = stored(48)
    index.remove(chunks[0])
    assert runs(index, tokens_of(1, 48), 0, 48) == []
    assert runs(index, tokens_of(1, 48), 16, 48) == [(16, 32), (32, 48)]
    assert runs(index, tokens_of(1, 48), 20, 40) == [(20, 32), (32, 40)]
    # The tokens before still name the chunk: another conversation's are another prefix.
    assert runs(index, [9, *tokens_of(1, 48)[1:]], 16, 48) == []


def test_a_partly_matching_chunk_must_reach_beyond_the_start() -> None:
    index, _chunks = stored(16)
    tokens = [*tokens_of(1, 8), *tokens_of(2, 24)]
    assert runs(index, tokens, 4, 32) == [(4, 8)]
    assert runs(index, tokens, 8, 32) == []


def test_a_gap_ends_the_run() -> None:
    index, chunks = stored(48)
    chunks[1].dropped = True
    assert runs(index, tokens_of(1, 48), 0, 48) == [(0, 16)]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), max_size=8), st.data())
@settings(max_examples=150)
def test_match_against_brute_force(stored_tokens: list[list[int]], data: st.DataObject) -> None:
    index, known, chunks = PrefixIndex(CHUNK_TOKENS, grain=1), {}, list[Chunk]()
    for tokens in stored_tokens:
        sequence = sequence_of(tokens)
        for number in range(-(-len(tokens) // 16)):
            name = name_of(sequence, number)
            if name.key not in known:
                known[name.key] = tokens[: number * 16 + name.num_tokens]
                chunks.append(ready(name))
                index.add(chunks[-1])
    base = data.draw(st.sampled_from(stored_tokens)) if stored_tokens else []
    wanted = base[: data.draw(st.integers(0, len(base)))]
    wanted = wanted + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
    start = data.draw(st.integers(0, len(wanted)))
    end = start
    for at in range(start, len(wanted)):  # is there a chunk that has token `at` after this prefix?
        first = at // 16 * 16
        if not any(
            first <= at < len(prefix) and (len(prefix) - 1) // 16 == at // 16
            and prefix[: at + 1] == wanted[: at + 1]
            for prefix in known.values()
        ):  # fmt: skip
            break
        end = at + 1
    pieces = index.match(sequence_of(wanted), start, len(wanted))
    assert (pieces[-1].stop if pieces else start) == end
    position = start
    for piece in pieces:
        assert piece.start == position < piece.stop
        assert known[piece.chunk.name.key][: piece.stop] == wanted[: piece.stop]
        position = piece.stop


# ---- where a hit may end (index/prefix.py) ------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 40))
def test_stops_of_a_chunk_are_16_tokens_apart(num_tokens: int, before: int) -> None:
    stops = sorted({stop_in(shared, num_tokens) for shared in range(num_tokens + 1)})
    apart = [b - a for a, b in pairwise(stops)]
    assert all(step >= GRAIN_TOKENS for step in apart)
    assert stops[0] == 0
    assert num_tokens < GRAIN_TOKENS or stops[-1] == num_tokens
    assert kept_end(num_tokens, max(0, num_tokens - before)) in (
        num_tokens,
        whole_blocks(num_tokens),
    )


def test_the_end_is_kept_where_the_answer_began_before_the_last_multiple() -> None:
    assert [kept_end(n, 40) for n in (47, 48, 49, 63, 70)] == [32, 48, 49, 63, 70]
    assert [kept_end(n, 48) for n in (48, 49, 50)] == [48, 49, 50]
    assert kept_end(20, 40) == 16, "aborted within its prompt"


def chunk_of(*tokens: int) -> Chunk:
    return ready(child(list(tokens)))


def best(index: PrefixIndex, *tokens: int) -> int:
    found = index.best_match(ROOT, b"", encode_tokens(tokens))
    return found[1] if found is not None else 0


def test_a_hit_ends_at_a_multiple_or_at_an_end() -> None:
    index = PrefixIndex(32, grain=4)
    tail = chunk_of(*range(14))
    index.add(tail)
    assert best(index, *range(14), 9) == best(index, *range(14)) == 14
    assert best(index, *range(13), 9) == best(index, *range(12)) == best(index, *range(9)) == 8
    assert best(index, *range(7)) == 4
    longer = chunk_of(*range(12), 7, 7, 7, 7, 7)
    assert index.extended_by(longer.name) == [tail], "though their ends differ"
    assert index.extends(tail.name) is False
    index.remove(tail)
    index.add(longer)
    assert index.extends(tail.name)
    assert best(index, *range(14), 9) == best(index, *range(12), 7, 9) == 12


def test_a_request_ends_where_its_last_token_might_differ() -> None:
    sequence, index = sequence_of(tokens_of(1, 64), chunk_tokens=32), PrefixIndex(32)
    chunks = [ready(name_of(sequence, n)) for n in range(2)]
    for chunk in chunks:
        index.add(chunk)
    another = sequence_of([*tokens_of(1, 63), 9], chunk_tokens=32)
    for asked in (sequence, another):
        assert [(p.start, p.stop) for p in index.match(asked, 0, 63)] == [(0, 32), (32, 48)]
    assert [(p.start, p.stop) for p in index.match(sequence, 0, 40)] == [(0, 32)]
    assert index.match(sequence, 32, 40) == []


def test_what_a_sequence_found_before_is_found_as_it_is_now() -> None:
    index, chunks = stored(64)
    sequence = sequence_of(tokens_of(1, 70))

    def found(start: int = 0) -> list[Chunk]:
        return [piece.chunk for piece in index.match(sequence, start, 70)]

    assert found() == found() == chunks
    assert found(16) == found(16) == chunks[1:]
    assert index.match(sequence, 16, 10) == []
    assert found() == found() == chunks
    chunks[1].dram = InTier(State.SAVING)  # of no use yet
    assert found() == chunks[:1]
    chunks[1].dram = InTier(State.READY)
    assert found() == chunks
    index.remove(chunks[2])
    assert found() == chunks[:2]
    chunks[2] = ready(name_of(sequence, 2))
    index.add(chunks[2])
    assert found() == chunks
    index, others = stored(64)
    assert found() == others, "another index has other chunks of these names"
    index.clear()
    assert found() == []


def test_siblings_that_begin_otherwise_are_passed_over() -> None:
    """Their objects are cold memory, and a request of which nothing is stored has many."""
    index, size = PrefixIndex(256), 256
    looked_at: list[bytes] = []

    class Tokens(bytes):
        def startswith(self, *args: Any) -> bool:
            looked_at.append(self)
            return super().startswith(*args)

    names = [child(tokens_of(seed, size)) for seed in range(20)]
    chunks = [ready(replace(name, tokens=Tokens(name.tokens))) for name in names]
    for chunk in chunks:
        index.add(chunk)
    assert best(index, *tokens_of(99, size)) == 0
    assert looked_at == []
    wanted = [*tokens_of(7, GRAIN_TOKENS), *tokens_of(99, size - GRAIN_TOKENS)]
    assert best(index, *wanted) == GRAIN_TOKENS, "one block, which is no whole eighth"
    assert looked_at == [names[7].tokens]


def test_an_entry_of_a_recovery_has_no_mark_of_whom_it_was_before() -> None:
    index, size = PrefixIndex(256), 256
    before, name = ready(child(tokens_of(1, size))), child(tokens_of(2, size))
    index.add(before)
    entry = before.entry
    index.remove(before)
    header = Header(name, NAMESPACE, bytes(16), 0, 1, 4096, bytes(16), 0).encode(size)
    found = index.adopt(memoryview(header), np.zeros(1, np.uint32), len(header))
    assert found[1].tolist() == [entry], "another name has the entry now"
    chunk = index.get(name.key)
    assert chunk is not None and index.learn(chunk, name.tokens)
    assert best(index, *tokens_of(2, GRAIN_TOKENS), *range(size - GRAIN_TOKENS)) == GRAIN_TOKENS
