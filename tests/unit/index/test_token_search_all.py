# SPDX-License-Identifier: Apache-2.0
"""What is stored anywhere in a prompt, with gaps: all of it, the longest first, and nothing else.

`runs` is the definition: tried out at every offset of every chunk, token by token.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.index.token_search import Extent
from tests.content_helpers import CHUNK, DOMAIN, OTHER, SURE, Known, World, numbered
from tests.unit.index.test_token_search import draw_slice, draw_tokens, drawn_world

COMPARED_MAX, BATCH, CANDIDATES_MAX, WALKS_MAX = 16, 96, 32, 8
"""As in csrc/content/content_index.h."""


def find_all(
    world: World, prompt: list[int], start: int = 0, stop: int | None = None, min_extent: int = 64,
    max_extents: int = 64, domain: bytes = DOMAIN,
) -> list[Extent]:  # fmt: skip
    """What the index finds; checked to be true, and to have cost no more than it may."""
    stop = len(prompt) if stop is None else stop
    found = world.index.find_all(
        domain, encode_tokens(prompt), start, stop, min_extent, max_extents
    )
    at = start
    for extent in found:
        assert at <= extent.start
        world.check_extent(extent, prompt, domain)
        assert extent.stop - extent.start >= min_extent
        at = extent.stop
    assert at <= stop and len(found) <= max_extents
    work, batches = world.index.work(), -(-(stop - start) // BATCH)
    assert work.windows <= stop - start
    assert work.candidates <= batches * CANDIDATES_MAX
    assert work.walks <= batches * WALKS_MAX
    most = max((len(chunk.tokens) for chunk in world.known.values()), default=0)
    assert work.compared_tokens <= COMPARED_MAX * work.windows + 2 * (stop - start) + most + 40
    return found


def runs(world: World, prompt: list[int], start: int, stop: int, domain: bytes) -> list[range]:
    """Tokens of the prompt that stand in a row in a stored sequence, and go no farther either way;
    those that have an anchor."""
    window, stride = min(32, world.chunk_tokens), min(64, world.chunk_tokens)
    mine = [chunk for chunk in world.known.values() if chunk.domain == domain]
    by_key = {chunk.name.key: chunk for chunk in mine}
    children = defaultdict(list)
    for chunk in mine:
        if chunk.native_from == 0:
            children[chunk.name.parent].append(chunk)

    def before(chunk: Known, first: int) -> int | None:
        """The token before it in the sequence."""
        if first > chunk.native_from:
            return chunk.tokens[first - 1]
        parent = by_key.get(chunk.name.parent) if first == 0 else None
        is_native = parent is not None and parent.native_from < len(parent.tokens)
        return parent.tokens[-1] if parent is not None and is_native else None

    def reach(chunk: Known, first: int, at: int, seen: bool) -> int:
        """The farthest stop of a run from there with an anchor, or -1."""
        shared, limit = 0, min(len(chunk.tokens) - first, stop - at)
        while shared < limit and chunk.tokens[first + shared] == prompt[at + shared]:
            shared += 1
        anchors = [chunk.native_from, *range(0, len(chunk.tokens), stride)]
        seen = seen or any(
            max(first, chunk.native_from) <= a and a + window <= first + shared for a in anchors
        )
        best = at + shared if seen else -1
        if first + shared == len(chunk.tokens) and shared and at + shared < stop:
            for child in children[chunk.name.key]:
                best = max(best, reach(child, 0, at + shared, seen))
        return best

    found = []
    for chunk in mine:
        for first in range(chunk.native_from, len(chunk.tokens)):
            for at in range(start, stop):
                if chunk.tokens[first] != prompt[at]:
                    continue
                if at > start and before(chunk, first) == prompt[at - 1]:
                    continue  # it begins before
                found.append(range(at, reach(chunk, first, at, False)))
    return [run for run in found if run]


def check_longest_first(found: list[Extent], wanted: list[range], min_extent: int) -> None:
    """As if of what the others leave the longest were taken again and again."""
    taken: list[range] = []
    left = wanted
    for extent in sorted(found, key=lambda extent: extent.start - extent.stop):
        longest = max(len(run) for run in left)
        assert extent.stop - extent.start == longest
        taken = [range(extent.start, extent.stop)]
        left = [part for run in left for part in without(run, taken[0])]
    assert all(len(run) < min_extent for run in left), "more is stored"


def without(run: range, taken: range) -> list[range]:
    if run.stop <= taken.start or taken.stop <= run.start:
        return [run]
    parts = range(run.start, taken.start), range(taken.stop, run.stop)
    return [part for part in parts if part]


@given(seed=st.integers(0, 2**32), chunk_tokens=st.sampled_from([16, 40, 64, 80, 128, 256]))
@settings(max_examples=120, deadline=None)
def test_finds_what_the_definition_finds(seed: int, chunk_tokens: int) -> None:
    random = Random(seed)
    world, sequences = drawn_world(random, chunk_tokens)
    prompt: list[int] = []
    for _ in range(random.randrange(1, 5)):
        prompt += draw_slice(random, sequences)
        prompt += draw_tokens(random, random.choice([0, 1, 20]), 2)
    start = random.choice([0, random.randrange(len(prompt) + 1)])
    stop = random.choice([len(prompt), random.randrange(start, len(prompt) + 1)])
    min_extent = random.choice([40, 64, 100])
    found = find_all(world, prompt, start, stop, min_extent)
    check_longest_first(found, runs(world, prompt, start, stop, DOMAIN), min_extent)


def documents(world: World, count: int, length: int) -> list[list[int]]:
    """Each is stored behind another text of its own, of an odd length."""
    texts = []
    for number in range(count):
        text = numbered(10_000 * (number + 1), length)
        world.add_all([*numbered(5_000_000 + 1000 * number, 37 + 11 * number), *text])
        texts.append(text)
    return texts


@pytest.mark.parametrize("length", [SURE, 100, 512])
def test_documents_in_another_order_with_gaps(length: int) -> None:
    world = World()
    texts = documents(world, 6, length)
    prompt, places = numbered(1, 24), []
    for text in (texts[i] for i in (3, 1, 5, 0, 4, 2)):
        places.append((len(prompt), len(prompt) + length))
        prompt += [*text, *numbered(900 + len(prompt), 24)]
    found = find_all(world, prompt)
    assert [(extent.start, extent.stop) for extent in found] == places
    assert world.index.work().walks == 6, "a place is followed once"
    # From the middle of one on, and up to the middle of another.
    start, stop = places[0][0] + 5, places[5][1] - 5
    cut = find_all(world, prompt, start, stop, min_extent=length - 5)
    assert [(extent.start, extent.stop) for extent in cut] == [
        (start, places[0][1]), *places[1:5], (places[5][0], stop),
    ]  # fmt: skip
    assert find_all(world, prompt, max_extents=2) != []
    assert find_all(world, prompt, domain=OTHER) == []


def test_one_document_twice() -> None:
    world = World()
    (text,) = documents(world, 1, 200)
    prompt = [*text, *text, 7, *text]
    found = find_all(world, prompt)
    assert [(extent.start, extent.stop) for extent in found] == [(0, 200), (200, 400), (401, 601)]


def test_the_longest_are_taken_of_too_many() -> None:
    world = World()
    prompt: list[int] = []
    for number in range(6):
        text = numbered(10_000 * (number + 1), 100 + 10 * number)
        world.add_all(text)
        prompt += [*text, 1, 2, 3]
    found = find_all(world, prompt, max_extents=2)
    assert [extent.stop - extent.start for extent in found] == [140, 150]


def test_moved_kv_is_not_found() -> None:
    world = World()
    tokens = numbered(1, 6 * CHUNK)
    world.add_all(tokens, native_from=100, is_exact=False)
    (extent,) = find_all(world, [9, 9, 9, *tokens])
    assert (extent.start, extent.stop, extent.is_exact) == (103, len(tokens) + 3, False)


def test_junk_before_a_document_hides_it_not() -> None:
    world = World(256)
    (text,) = documents(world, 1, 512)
    for number in range(40):
        world.add_all([5] * 256 * 4, salt=str(number))
    prompt = [5] * 4000 + text + [5] * 4000
    assert any((extent.start, extent.stop) == (4000, 4512) for extent in find_all(world, prompt))


def test_hostile_sequences_cost_no_more() -> None:
    """The same long text behind 200 others: every place is a run of its own."""
    world = World(256)
    text = numbered(1, 4000)
    for number in range(200):
        world.add_all([*numbered(1_000_000 + 300 * number, 3 + number), *text])
    found = find_all(world, [*text, *text])
    assert [(extent.start, extent.stop) for extent in found] == [(0, 4000), (4000, 8000)]
