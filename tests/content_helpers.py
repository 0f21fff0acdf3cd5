# SPDX-License-Identifier: Apache-2.0
"""A content index beside what it should know, and the definition of what it should find."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import encode_tokens, root_key
from attnstore_vllm.index.token_search import ContentIndex, Extent
from attnstore_vllm.types import TOKEN_BYTES, Key
from tests.helpers import NAMESPACE, names_of, sequence_of

CHUNK = 64
DOMAIN = root_key(NAMESPACE, None, b"")
OTHER = root_key(NAMESPACE, "another", b"")
SURE = 32 + 64 - 1
"""Tokens in a row that are found wherever they lie."""

# As in csrc/content/content_index.h.
CANDIDATES_MAX, WALKS_MAX, SIBLINGS_MAX, NEIGHBOURS = 32, 8, 4096, 4
LOOKS_MAX = 13 + 2 * NEIGHBOURS


def numbered(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def named(key: Key, parent: Key, tokens: bytes) -> ChunkName:
    return ChunkName(key, parent, b"", bytes(32), 0, len(tokens) // TOKEN_BYTES, tokens)


@dataclass(frozen=True, slots=True)
class Known:
    name: ChunkName
    domain: bytes
    native_from: int
    is_exact: bool
    tokens: list[int]


@dataclass(slots=True)
class World:
    """An index, and what it should know."""

    chunk_tokens: int = CHUNK
    max_chunks: int = 10_000
    known: dict[bytes, Known] = field(default_factory=dict)
    index: ContentIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = ContentIndex(self.chunk_tokens, self.max_chunks, seed=7)

    def add(
        self, name: ChunkName, domain: bytes = DOMAIN, native_from: int = 0, is_exact: bool = True
    ) -> None:
        tokens = [
            int.from_bytes(name.tokens[at : at + TOKEN_BYTES], "big")
            for at in range(0, len(name.tokens), TOKEN_BYTES)
        ]
        self.known[name.key] = Known(name, domain, native_from, is_exact, tokens)
        self.index.add(name, domain, native_from, is_exact)

    def add_all(
        self,
        tokens: list[int],
        domain: bytes = DOMAIN,
        native_from: int = 0,
        is_exact: bool = True,
        salt: str | None = None,
    ) -> list[ChunkName]:
        """Enter a sequence whose first `native_from` tokens have moved KV."""
        names = names_of(sequence_of(tokens, salt, self.chunk_tokens))
        for name in names:
            moved = min(max(native_from - name.position, 0), name.num_tokens)
            self.add(name, domain, moved, is_exact)
        return names

    def drop(self, key: Key) -> None:
        del self.known[key]
        assert self.index.drop(key)

    def find(
        self,
        prompt: list[int],
        start: int = 0,
        stop: int | None = None,
        min_extent: int = 1,
        max_extents: int = 64,
        domain: bytes = DOMAIN,
    ) -> list[Extent]:
        """What the index finds; checked to be true, and to have cost no more than it may."""
        stop = len(prompt) if stop is None else stop
        encoded = encode_tokens(prompt)
        cover = self.index.find(domain, encoded, start, stop, min_extent, max_extents)
        self._check(cover, prompt, start, stop, domain)
        assert len(cover) <= max_extents
        assert all(extent.stop - extent.start >= min_extent for extent in cover)
        end = cover[-1].stop if cover else start
        pieces = sum(len(extent.pieces) for extent in cover)
        rounds = len(cover) + 1
        work = self.index.work()
        assert work.windows <= rounds * (32 + 64)
        assert work.candidates <= rounds * CANDIDATES_MAX
        assert work.walks <= rounds * WALKS_MAX
        assert work.compared_tokens <= (
            rounds * (CANDIDATES_MAX * 127 + WALKS_MAX) + WALKS_MAX * (end - start + min_extent)
        )
        steps = pieces + 2 * rounds + min_extent // self.chunk_tokens
        assert work.looks <= WALKS_MAX * steps * LOOKS_MAX
        return cover

    def _check(
        self, cover: list[Extent], prompt: list[int], start: int, stop: int, domain: bytes
    ) -> None:
        at = start
        for extent in cover:
            assert extent.start == at < extent.stop <= stop
            self.check_extent(extent, prompt, domain)
            at = extent.stop

    def check_extent(self, extent: Extent, prompt: list[int], domain: bytes) -> None:
        """It is true, token by token."""
        at = extent.start
        before: Known | None = None
        all_exact = True
        for piece in extent.pieces:
            chunk = self.known[piece.key]
            last = piece.first + piece.num_tokens
            assert chunk.domain == domain
            assert piece.tokens == chunk.name.tokens
            assert piece.start == at < piece.stop
            assert chunk.native_from <= piece.first
            assert chunk.tokens[piece.first : last] == prompt[piece.start : piece.stop]
            if before is not None:
                assert piece.first == 0 and chunk.name.parent == before.name.key
            all_exact = all_exact and chunk.is_exact
            before, at = chunk, piece.stop
            if piece is not extent.pieces[-1]:
                assert last == len(chunk.tokens)
        assert extent.stop == at
        assert extent.is_exact == all_exact


def expected_stops(
    world: World, prompt: list[int], start: int, stop: int, min_extent: int, domain: bytes
) -> list[int]:
    """Where the extents should end."""
    window = min(32, world.chunk_tokens)
    stride = min(64, world.chunk_tokens)
    children = defaultdict(list)
    mine = [chunk for chunk in world.known.values() if chunk.domain == domain]
    for chunk in mine:
        if chunk.native_from == 0:
            children[chunk.name.parent].append(chunk)

    def reach(chunk: Known, first: int, at: int, begin: int, seen: bool) -> int:
        """Of all ways from there the farthest with an anchor near its beginning, or -1."""
        shared = 0
        limit = min(len(chunk.tokens) - first, stop - at)
        while shared < limit and chunk.tokens[first + shared] == prompt[at + shared]:
            shared += 1
        for offset in range(len(chunk.tokens)):
            is_anchor = offset == chunk.native_from or (
                offset > chunk.native_from and offset % stride == 0
            )
            if is_anchor and first <= offset and offset + window <= first + shared:
                seen = seen or at + offset - first < begin + stride + window
        best = at + shared if seen else -1
        if first + shared == len(chunk.tokens) and shared and at + shared < stop:
            for child in children[chunk.name.key]:
                best = max(best, reach(child, 0, at + shared, begin, seen))
        return best

    stops: list[int] = []
    at = start
    while stop - at >= min_extent:
        ways = (
            reach(chunk, first, at, at, False)
            for chunk in mine
            for first in range(chunk.native_from, len(chunk.tokens))
            if at < stop and chunk.tokens[first] == prompt[at]
        )
        best = max(ways, default=-1)
        if best - at < min_extent or best <= at:
            break
        stops.append(best)
        at = best
    return stops
