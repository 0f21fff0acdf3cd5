# SPDX-License-Identifier: Apache-2.0
"""The content index under input that somebody made up to hurt it.

What it says must be true and its work bounded, whatever is stored and asked for. World.find()
checks both, at every call; times are those of benchmarks/micro/extents.py.
"""

from __future__ import annotations

from random import Random

from blake3 import blake3

from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.types import Key
from tests.content_helpers import (
    CANDIDATES_MAX,
    DOMAIN,
    LOOKS_MAX,
    OTHER,
    SIBLINGS_MAX,
    WALKS_MAX,
    World,
    named,
    numbered,
)


def add_orphans(world: World, token_lists: list[list[int]], parent: Key | None = None) -> None:
    """Chunks with parents that are not there, or all with this one."""
    for number, tokens in enumerate(token_lists):
        key = Key(blake3(b"key %d" % number).digest())
        above = parent or Key(blake3(b"parent %d" % number).digest())
        world.add(named(key, above, encode_tokens(tokens)))


def test_one_repeated_token() -> None:
    world = World(256)
    world.add_all([5] * 256 * 16)
    add_orphans(world, [[5] * 256] * 1000)
    cover = world.find([5] * 8192)
    assert cover and cover[-1].stop >= 8192 - 256
    # Windows that are the same are looked at once.
    assert world.index.work().candidates <= 4 * (len(cover) + 1)


def test_one_repeated_token_pushes_nobody_out() -> None:
    world = World(256)
    tokens = [numbered(1000 * i, 256) for i in range(1, 1000)]
    add_orphans(world, tokens)
    for number in range(5000):
        name = named(Key(blake3(b"%d" % number).digest()), DOMAIN, encode_tokens([5] * 256))
        world.index.add(name, DOMAIN)
    for some in tokens:
        assert world.find([*some[100:], 0]), "its anchors are gone"


def test_another_tenant_pushes_nobody_out() -> None:
    world = World()
    tokens = numbered(1, 200)
    world.add_all(tokens)
    for number in range(100):
        world.add_all(tokens, OTHER, salt=str(number))
    assert [extent.stop for extent in world.find(tokens)] == [200]


def test_a_collision_is_not_an_answer() -> None:
    """Of the hash 16 bits are in the table: some of many windows look like a stored one."""
    random = Random(1)
    world = World(1024, max_chunks=64)
    for number in range(64):
        world.add_all([random.getrandbits(32) for _ in range(1024)], salt=str(number))
    tokens = encode_tokens([random.getrandbits(32) for _ in range(100_032)])
    collisions = 0
    for at in range(100_000):
        assert world.index.find(DOMAIN, tokens, at, at + 32, 1) == []
        collisions += world.index.work().candidates
    assert collisions > 0


def test_all_but_the_last_token_agree() -> None:
    world = World(256)
    prompt = numbered(1, 4096)
    add_orphans(world, [[*prompt[256 * (i % 16) :][:255], 0] for i in range(2000)])
    assert [extent.stop for extent in world.find(prompt)] == [255]
    chain = World(256)
    for way in range(64):
        chain.add_all([*prompt[100 : 4032 + way], 0], salt=str(way))
    assert chain.find(prompt[100:])[0].stop == 3995
    assert chain.index.work().walks <= 2 * WALKS_MAX


def test_thousands_of_children() -> None:
    world = World(256)
    begin = numbered(1, 256)
    (parent,) = world.add_all(begin)
    way = numbered(5000, 254)
    children = [[*way, i, i] for i in range(5000)]
    add_orphans(world, children, parent.key)
    found = sum(world.find(begin[9:] + child)[-1].stop == 503 for child in children[::50])
    # Beyond SIBLINGS_MAX a child is found up to where its nearest sibling differs.
    assert found == len(children[:SIBLINGS_MAX:50])
    assert world.find(begin[9:] + children[-1])[0].stop == 501
    for child in children[:10]:
        world.find(begin[9:] + child)
        assert world.index.work().looks <= 2 * LOOKS_MAX
    for key in list(world.known):
        world.drop(Key(key))
    assert world.find(begin) == []


def test_thousands_of_equal_windows() -> None:
    """Only one of them goes on as the prompt does."""
    world = World(256)
    common = numbered(1, 128)
    rest = [numbered(1000 * i, 128) for i in range(1, 3000)]
    add_orphans(world, [common + some for some in rest])
    cover = world.find(common + rest[1500])
    # The newest of the equal ones first; then by what is its own.
    assert cover[-1].stop == 256
    assert len(cover) == 2


def test_periodic_tokens() -> None:
    for period in (2, 3, 7, 64, 95, 96, 97):
        world = World(256)
        pattern = numbered(1, period)
        tokens = (pattern * 4096)[:4096]
        world.add_all(tokens)
        add_orphans(world, [tokens[i : i + 256] for i in range(200)])
        cover = world.find(tokens[5:])
        assert cover and cover[0].stop >= 256 - 95


def test_places_that_do_not_reach_back() -> None:
    """Every window of the prompt is stored, and nothing of what is before it."""
    world = World(256)
    prompt = [0, *numbered(1, 200)]
    add_orphans(world, [prompt[at : at + 32] for at in range(1, 96)])
    assert world.find(prompt) == []
    assert world.index.work().candidates == CANDIDATES_MAX
    assert world.index.work().walks == 0
    assert [extent.stop for extent in world.find(prompt, 1)][:2] == [33, 65]
