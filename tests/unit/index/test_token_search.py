# SPDX-License-Identifier: Apache-2.0
"""The content index: what is left of a truncated prompt is found, and nothing else is.

`expected_stops` is the definition: tried out at every offset of every chunk, token by token. The
index may miss what repeats itself; prompts that are drawn at random do not, even over two tokens.
"""

from __future__ import annotations

from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.index.token_search import ContentIndex
from attnstore_vllm.types import Key
from tests.content_helpers import (
    CHUNK,
    DOMAIN,
    OTHER,
    SURE,
    World,
    expected_stops,
    named,
    numbered,
)
from tests.helpers import names_of, sequence_of


def draw_tokens(random: Random, count: int, alphabet: int) -> list[int]:
    # Large ones too, so that a token is all of its four bytes.
    letters = [0, 1, 2**32 - 1, 256, 2**31, 77, 65536, 3][:alphabet]
    return random.choices(letters, k=count)


def draw_slice(random: Random, sequences: list[list[int]]) -> list[int]:
    tokens = random.choice(sequences)
    ends = sorted(random.choices(range(len(tokens) + 1), k=2))
    return tokens[ends[0] : ends[1]]


def drawn_world(random: Random, chunk_tokens: int) -> tuple[World, list[list[int]]]:
    """Sequences that branch off each other, repeat parts of each other, and have moved KV."""
    alphabet = random.choice([2, 3, 8])
    world = World(chunk_tokens)
    sequences: list[list[int]] = [draw_tokens(random, random.randrange(1, 400), alphabet)]
    world.add_all(sequences[0])
    for number in range(random.randrange(3)):
        begin = random.choice(sequences)
        begin = begin[: random.randrange(len(begin) + 1)] if random.random() < 0.7 else []
        tokens = [*begin, *draw_tokens(random, random.randrange(1, 300), alphabet)]
        if random.random() < 0.3:
            tokens += draw_slice(random, sequences)
        sequences.append(tokens)
        domain = OTHER if random.random() < 0.15 else DOMAIN
        if domain == OTHER:
            world.add_all(tokens, OTHER, salt="another")
        elif random.random() < 0.4:
            native_from = random.randrange(len(tokens))
            world.add_all(tokens, DOMAIN, native_from, is_exact=False, salt=f"moved {number}")
        else:
            world.add_all(tokens)
    for key in random.sample(
        list(world.known), k=random.choice([0, 0, 1, 2, 3]) % len(world.known)
    ):
        world.drop(Key(key))
    return world, sequences


@given(seed=st.integers(0, 2**32), chunk_tokens=st.sampled_from([16, 40, 64, 80, 128, 256]))
@settings(max_examples=250)
def test_covers_what_the_definition_covers(seed: int, chunk_tokens: int) -> None:
    random = Random(seed)
    world, sequences = drawn_world(random, chunk_tokens)
    for _ in range(3):
        prompt = draw_tokens(random, random.choice([0, 0, 5]), 2)
        start = len(prompt)
        for _ in range(random.randrange(1, 4)):
            prompt += draw_slice(random, sequences)
        prompt += draw_tokens(random, random.choice([0, 20]), 2)
        stop = random.choice([len(prompt), random.randrange(start, len(prompt) + 1)])
        min_extent = random.choice([1, 1, 40, 100])
        cover = world.find(prompt, start, stop, min_extent)
        expected = expected_stops(world, prompt, start, stop, min_extent, DOMAIN)
        assert [extent.stop for extent in cover] == expected


@given(data=st.data())
@settings(max_examples=150)
def test_low_entropy_is_covered_truly(data: st.DataObject) -> None:
    """Whatever repeats itself, what is found is there and bounded: find() checks it."""
    runs = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 150)), min_size=1, max_size=5)

    def drawn() -> list[int]:
        return [token for token, count in data.draw(runs) for _ in range(count)]

    world = World(data.draw(st.sampled_from([16, 64, 128])))
    for _ in range(data.draw(st.integers(1, 4))):
        world.add_all(drawn())
    prompt = drawn()
    cover = world.find(prompt, data.draw(st.integers(0, len(prompt))))
    if not cover:
        return
    again = world.find(prompt[cover[0].start : cover[0].stop])
    assert again, "a part of what was found is not found"


def test_truncation_from_the_left_at_every_offset() -> None:
    world = World()
    tokens = numbered(1, 5 * CHUNK + 40)
    names = world.add_all(tokens)
    for cut in range(len(tokens) - SURE + 1):
        (extent,) = world.find(tokens[cut:])
        assert (extent.start, extent.stop, extent.is_exact) == (0, len(tokens) - cut, True)
        first = extent.pieces[0]
        assert (first.key, first.first) == (names[cut // CHUNK].key, cut % CHUNK)
        assert len(extent.pieces) == len(names) - cut // CHUNK


def test_middle_cut_with_the_system_prompt_kept() -> None:
    world = World()
    tokens = numbered(1, 12 * CHUNK)
    world.add_all(tokens)
    for kept, resumed in ((CHUNK, 3 * CHUNK), (100, 300), (150, 601), (97, 98)):
        prompt = tokens[:kept] + tokens[resumed:] + [0, 0, 0]
        # From behind what the prefix index finds, and from the start.
        (extent,) = world.find(prompt, kept)
        assert (extent.start, extent.stop) == (kept, len(prompt) - 3)
        both = world.find(prompt)
        assert [extent.stop for extent in both] == [kept, len(prompt) - 3]


def test_several_cuts() -> None:
    """As when the thinking of earlier turns is removed."""
    world = World()
    tokens = numbered(1, 3000)
    world.add_all(tokens)
    prompt, stops = [], []
    for first in range(0, 3000, 300):
        prompt += tokens[first : first + 170]
        stops.append(len(prompt))
    assert [extent.stop for extent in world.find(prompt)] == stops
    assert [extent.stop for extent in world.find(prompt, max_extents=3)] == stops[:3]
    assert [extent.stop for extent in world.find(prompt, stop=400)] == [170, 340]
    # Two tokens that nobody stored end it.
    prompt[500:502] = [0, 0]
    assert world.find(prompt)[-1].stop == 500


def test_what_is_shorter_than_min_extent_ends_the_cover() -> None:
    world = World()
    tokens = numbered(1, 1000)
    world.add_all(tokens)
    prompt = tokens[10:310] + tokens[500:620] + tokens[700:1000]
    assert [extent.stop for extent in world.find(prompt, min_extent=120)] == [300, 420, 720]
    assert [extent.stop for extent in world.find(prompt, min_extent=121)] == [300]
    # The last piece of an extent may be as short as it likes.
    (extent,) = world.find(tokens[32 : 5 * CHUNK + 3], min_extent=200)
    assert extent.pieces[-1].num_tokens == 3


def test_tenants_are_apart() -> None:
    world = World()
    tokens = numbered(1, 400)
    world.add_all(tokens, OTHER, salt="another")
    assert world.find(tokens) == []
    assert world.find(tokens, domain=bytes(32)) == []
    (extent,) = world.find(tokens, domain=OTHER)
    assert extent.stop == 400
    # Half of a sequence with one tenant, and all of it with the other.
    world.add_all(tokens[:200])
    assert [extent.stop for extent in world.find(tokens)] == [200]


def test_a_chain_is_not_followed_into_another_domain() -> None:
    world = World()
    tokens = numbered(1, 4 * CHUNK)
    for number, name in enumerate(names_of(sequence_of(tokens, None, CHUNK))):
        world.add(name, DOMAIN if number % 2 else OTHER)
    assert [extent.stop for extent in world.find(tokens[CHUNK:])] == [CHUNK]
    assert world.find(tokens[CHUNK // 2 :]) == []


@pytest.mark.parametrize("native_from", [1, 5, CHUNK, CHUNK + 1, 100, 3 * CHUNK - 1])
def test_moved_kv_is_not_found(native_from: int) -> None:
    world = World()
    tokens = numbered(1, 6 * CHUNK)
    world.add_all(tokens, native_from=native_from, is_exact=False)
    assert world.find(tokens) == []
    assert world.find(tokens[native_from - 1 :]) == []
    for cut in (native_from, native_from + 1, native_from + 31, native_from + 80):
        (extent,) = world.find(tokens[cut:])
        assert (extent.stop, extent.is_exact) == (len(tokens) - cut, False)


def test_a_chain_ends_before_moved_kv() -> None:
    world = World()
    tokens = numbered(1, 4 * CHUNK)
    for number, name in enumerate(names_of(sequence_of(tokens, None, CHUNK))):
        world.add(name, native_from=1 if number == 2 else 0)
    assert [extent.stop for extent in world.find(tokens)] == [2 * CHUNK]


def test_exact_is_preferred_then_the_newest() -> None:
    tokens = numbered(1, 3 * CHUNK)
    for order in ((True, False), (False, True)):
        world = World()
        for is_exact in order:
            world.add_all(tokens, is_exact=is_exact, salt=str(is_exact))
        (extent,) = world.find(tokens[9:])
        assert extent.is_exact
    world = World()
    for salt in "ab":
        names = world.add_all(tokens, salt=salt)
    (extent,) = world.find(tokens[9:])
    assert extent.pieces[0].key == names[0].key
    # As new is what was found.
    starts = [numbered(8000, CHUNK), numbered(9000, CHUNK)]
    _, first, *_ = world.add_all(starts[0] + tokens)
    _, second, *_ = world.add_all(starts[1] + tokens)
    assert world.find(tokens[9:])[0].pieces[0].key == second.key
    world.find(starts[0] + tokens)
    assert world.find(tokens[9:])[0].pieces[0].key == first.key
    # But the longest before the exact.
    world.add_all([*tokens, *numbered(5000, 40)], is_exact=False, salt="longer")
    (extent,) = world.find([*tokens[9:], *numbered(5000, 40)])
    assert (extent.stop, extent.is_exact) == (3 * CHUNK - 9 + 40, False)


def test_exact_child_among_equals() -> None:
    """Two names for the same tokens after one parent."""
    tokens = numbered(1, 2 * 256)
    parent, child = names_of(sequence_of(tokens, None, 256))
    for order in ((True, False), (False, True)):
        world = World(256)
        world.add(parent)
        for is_exact in order:
            key = Key(blake3(b"exact" if is_exact else b"not").digest())
            world.add(named(key, child.parent, child.tokens), is_exact=is_exact)
        (extent,) = world.find(tokens[10:])
        assert extent.is_exact


def test_tails() -> None:
    world = World()
    tokens = numbered(1, 2 * CHUNK)
    for length in (31, 32, 50):
        world.add_all(numbered(1000 * length, length))
        found = world.find(numbered(1000 * length, length))
        assert [extent.stop for extent in found] == ([length] if length >= 32 else [])
    # Too short for an anchor of its own: behind its parent.
    world.add_all([*tokens, 7, 8, 9])
    assert [extent.stop for extent in world.find([*tokens[1:], 7, 8, 9])] == [2 * CHUNK + 2]
    # A longer sibling.
    world.add_all([*tokens, 7, 8, 9, 10, 11])
    assert [extent.stop for extent in world.find([*tokens[1:], 7, 8, 9, 10, 12])] == [2 * CHUNK + 3]


def test_the_child_that_shares_most() -> None:
    world = World(256)
    begin = numbered(1, 256)
    random = Random(5)
    ways = [[random.choice([1, 2]) for _ in range(random.randrange(1, 257))] for _ in range(300)]
    for way in ways:
        world.add_all(begin + way)
    for _ in range(100):
        wanted = [*random.choice(ways)[: random.randrange(1, 257)], 3]
        longest = max(
            next((i for i, pair in enumerate(zip(way, wanted, strict=False)) if len({*pair}) > 1),
                 min(len(way), len(wanted)))
            for way in ways
        )  # fmt: skip
        assert world.find(begin[100:] + wanted)[0].stop == 156 + longest


def test_oldest_leave_at_max_chunks() -> None:
    world = World(max_chunks=6)
    sequences = [numbered(1000 * i, 2 * CHUNK) for i in range(1, 5)]
    for tokens in sequences[:3]:
        world.add_all(tokens)
    assert len(world.index) == 6
    assert world.find(sequences[0])  # and so is not the oldest any more
    world.add_all(sequences[3])
    assert len(world.index) == 6
    assert [bool(world.find(tokens)) for tokens in sequences] == [True, False, True, True]
    world.add_all(sequences[3])  # known: nobody leaves
    assert world.find(sequences[2])


def test_many_come_and_go() -> None:
    """Entries are used again; nothing that left is found, and nothing is left of it."""
    random = Random(3)
    world = World(max_chunks=40)
    alive: dict[int, list[Key]] = {}
    for number in range(600):
        tokens = numbered(1000 * number, random.randrange(32, 4 * CHUNK))
        alive[number] = [name.key for name in world.add_all(tokens)]
        if random.random() < 0.5:
            gone = random.choice(list(alive))
            present = [world.index.drop(key) for key in alive.pop(gone)]
            assert any(present) or gone < number - 5
            assert world.find(numbered(1000 * gone, 4 * CHUNK)) == []
        for known in list(alive):
            if known < number - 40:
                del alive[known]
    assert world.find(numbered(1000 * number, 32)) or number not in alive
    for key in list(world.known):
        world.index.drop(Key(key))
    assert len(world.index) == 0
    for number in range(600):
        assert world.find(numbered(1000 * number, 4 * CHUNK)) == []


def test_remove_and_clear() -> None:
    world = World()
    tokens = numbered(1, 4 * CHUNK)
    names = world.add_all(tokens)
    assert not world.index.drop(Key(bytes(32)))
    world.drop(names[1].key)
    assert not world.index.drop(names[1].key)
    # What is behind it is found where it begins.
    assert [extent.stop for extent in world.find(tokens)] == [CHUNK]
    assert [extent.stop for extent in world.find(tokens[2 * CHUNK :])] == [2 * CHUNK]
    before = world.index.memory_bytes()
    world.index.clear()
    assert len(world.index) == 0
    assert world.index.memory_bytes() < before
    assert world.find(tokens) == []
    world.add_all(tokens)
    assert len(world.find(tokens)) == 1


def test_added_again_it_is_what_was_said_last() -> None:
    world = World()
    tokens = numbered(1, CHUNK)
    (name,) = world.add_all(tokens, is_exact=False)
    world.add(name, native_from=20)
    assert len(world.index) == 1
    assert world.find(tokens) == []
    (extent,) = world.find(tokens[20:])
    assert extent.is_exact


def test_impossible_arguments() -> None:
    index = ContentIndex(CHUNK, 10)
    name = named(Key(bytes(32)), Key(bytes(32)), encode_tokens(numbered(1, CHUNK)))
    for domain, native_from in ((b"short", 0), (DOMAIN, CHUNK + 1), (DOMAIN, -1)):
        with pytest.raises((ValueError, TypeError)):
            index.add(name, domain, native_from)
    with pytest.raises(ValueError, match="65 tokens"):
        index.add(named(name.key, name.parent, encode_tokens(numbered(1, CHUNK + 1))), DOMAIN)
    with pytest.raises(ValueError, match="0 tokens"):
        index.add(named(name.key, name.parent, b""), DOMAIN)
    assert len(index) == 0
    for start, stop in ((1, 0), (0, 3)):
        with pytest.raises(ValueError, match="no such tokens"):
            index.find(DOMAIN, bytes(8), start, stop, 1)
    with pytest.raises(ValueError, match="whole tokens"):
        index.find(DOMAIN, bytes(7), 0, 1, 1)
    for chunk_tokens, max_chunks in ((0, 1), (65537, 1), (64, 0)):
        with pytest.raises(ValueError, match="must be"):
            ContentIndex(chunk_tokens, max_chunks)
