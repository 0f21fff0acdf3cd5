# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks hold a prompt's tokens at other positions (DESIGN section 6).

Nothing is kept, and nothing found, before the first request that asks for it. A restart begins
anew: a conversation is found again once a turn of it has been served in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece, PrefixIndex, pieces_before
from attnstore_vllm.index.token_search import ContentIndex, Extent, MovedPiece
from attnstore_vllm.types import TOKEN_BYTES, Key

CHUNKS_MAX = 1 << 18
"""Chunks whose tokens are kept: with 256 each, and what finds them, some 350 MB."""
MOVABLE_MAX, MOVABLE_TOKENS_MAX = 512, 1 << 15
"""Chunks that one answer to another engine names, and tokens that are searched for it: a longer
prompt's are found in parts."""
HEARD_OF_MAX = 4096
"""Room for chunks that other engines have, so that they push out none of ours."""
STALE_MAX = 16
"""Times that a search begins anew since something that it found was gone; then there is nothing."""


class Movable(NamedTuple):
    """A stored chunk whose KV may be moved, as note() is told of it."""

    name: ChunkName
    """With its tokens."""
    domain: Key
    native_from: int
    is_exact: bool


class MovedKv:
    """Chunks that could be moved. Not thread-safe: the store's lock covers it.

    Args:
        chunks_max: of which tokens are kept; what was found or noted longest ago goes. CHUNKS_MAX
            at most.
        min_tokens: fewer in a row are computed.
        sinks: first tokens of a prompt that are never moved ones: a prompt of which fewer are in
            their place is computed.
        recompute: this share of each document, its first tokens, is computed with the gap before.
        recompute_last: so many of the last moved tokens are computed.
        seed: below 2^63; a secret, so that no prompt can be written whose windows collide.
    """

    def __init__(
        self,
        index: PrefixIndex,
        chunk_tokens: int,
        chunks_max: int,
        *,
        min_tokens: int,
        sinks: int,
        seed: int,
        recompute: float = 0.0,
        recompute_last: int = 0,
    ) -> None:
        self._recompute, self._recompute_last = recompute, recompute_last
        self._index = index
        self._chunk_tokens = chunk_tokens
        self._chunks_max = min(chunks_max + HEARD_OF_MAX, CHUNKS_MAX)
        self._min_tokens = min_tokens
        self._sinks = sinks
        self._seed = seed
        self._content: ContentIndex | None = None
        self._searched = 0

    def take_searched(self) -> int:
        """Work.as_looked_up() of the searches since the last call."""
        searched, self._searched = self._searched, 0
        return searched

    def note(self, name: ChunkName, domain: Key, native_from: int, *, is_exact: bool) -> None:
        """The chunk is stored, and may be moved, of the domain's requests alone.

        Args:
            domain: the root of the sequences that it may be found for.
            native_from: the first of its tokens whose KV was computed where it stands.
            is_exact: behind no moved KV.
        """
        if name.extra or not name.tokens:
            return  # of an image equal tokens say nothing
        if self._content is None:
            self._content = ContentIndex(self._chunk_tokens, self._chunks_max, self._seed)
        self._content.add(name, domain, native_from=native_from, is_exact=is_exact)

    def clear(self) -> None:
        """Forget all."""
        self._content = None

    def go_on(
        self, pieces: list[Piece], sequence: SequenceKeys, start: int, stop: int
    ) -> list[Piece]:
        """`pieces`, or KV in its place up to any token and behind it moved KV, without a gap, of
        tokens up to `stop` at most. Where that may end is for prefix.settle() to say.

        Args:
            pieces: what is found in its place.
            start: where `pieces` begin; before it the KV is in HBM, and in its place.
        """
        begin = pieces[-1].stop if pieces else start
        if self._content is None or stop - begin < self._min_tokens:
            return pieces
        placed = self._index.match(sequence, start, stop, grain=1)
        moved = self._behind(placed[-1].stop if placed else start, sequence, stop)
        moved = pieces_before(moved, moved[-1].stop - self._recompute_last) if moved else []
        return placed + moved if moved else pieces

    def anywhere(
        self, pieces: list[Piece], sequence: SequenceKeys, start: int, stop: int
    ) -> list[Piece]:
        """`pieces`, and behind them KV of documents that stand anywhere up to `stop`, with gaps.

        Args: as go_on()'s.
        """
        if self._content is None:
            return pieces
        placed = self._index.match(sequence, start, stop, grain=1)
        begin = max(placed[-1].stop if placed else start, self._sinks)
        if stop - begin < self._min_tokens:
            return pieces
        tokens = sequence.tokens(0, stop)
        for _ in range(STALE_MAX):
            extents = self._content.find_all(
                sequence.root, tokens, begin, stop, min_extent=self._min_tokens
            )
            self._searched += self._content.work().as_looked_up()
            wanted = [moved for extent in extents for moved in extent.pieces]
            gone = [moved.key for moved in wanted if self._index.get(moved.key) is None]
            if not gone:
                documents = [self._usable(self._cut(extent)) for extent in extents]
                found = [[replace(some[0], gap=True), *some[1:]] for some in documents if some]
                moved = [piece for some in found for piece in some]
                if moved:
                    moved = pieces_before(moved, moved[-1].stop - self._recompute_last)
                return placed + moved if moved else pieces
            for key in gone:
                self._content.drop(key)
        return pieces

    def _cut(self, extent: Extent) -> list[MovedPiece]:
        """The document without the tokens that are computed anew."""
        first = extent.start + math.ceil(self._recompute * (extent.stop - extent.start))
        kept = []
        for piece in extent.pieces:
            skip = max(0, first - piece.start)
            if skip < piece.num_tokens:
                kept.append(piece._replace(first=piece.first + skip, start=piece.start + skip))
        return kept

    def _behind(self, begin: int, sequence: SequenceKeys, stop: int) -> list[Piece]:
        """Moved KV of the tokens from `begin` on."""
        if self._content is None or stop - begin < self._min_tokens or begin < self._sinks:
            return []
        tokens = sequence.tokens(0, stop)
        for _ in range(STALE_MAX):
            extents = self._content.find(
                sequence.root, tokens, begin, stop, min_extent=self._min_tokens
            )
            self._searched += self._content.work().as_looked_up()
            wanted = [moved for extent in extents for moved in extent.pieces]
            gone = [moved.key for moved in wanted if self._index.get(moved.key) is None]
            if not gone:
                return self._usable(wanted)
            for key in gone:
                self._content.drop(key)
        return []

    def movable(
        self, domain: Key, tokens: bytes, begin: int, has: Callable[[Chunk], bool]
    ) -> list[Movable]:
        """For an engine that asks us: chunks with KV of these tokens from `begin` on, wherever they
        stood, without a gap, up to the first that is just being saved.

        Args:
            tokens: a part of a prompt, as encode_tokens() makes them; `begin` counts from there.
            has: whether a chunk is here.
        Cost: bounded by MOVABLE_MAX chunks and MOVABLE_TOKENS_MAX tokens.
        """
        stop = min(len(tokens) // TOKEN_BYTES, begin + MOVABLE_TOKENS_MAX)
        if self._content is None or stop - begin < self._min_tokens:
            return []
        for _ in range(STALE_MAX):
            cover = self._content.find(domain, tokens, begin, stop, min_extent=self._min_tokens)
            found = dict[Key, Movable]()
            gone = False
            pieces = [(piece, extent.is_exact) for extent in cover for piece in extent.pieces]
            for piece, is_exact in pieces:
                chunk = self._index.get(piece.key)
                if chunk is None or (chunk.dram.state is State.ABSENT and not has(chunk)):
                    gone |= self._content.drop(piece.key)
                elif not has(chunk) or len(found) >= MOVABLE_MAX:
                    break
                elif piece.key not in found or piece.first < found[piece.key].native_from:
                    # Of what is not exact more tokens may be native; from here on they are.
                    first = 0 if is_exact else piece.first
                    name = replace(chunk.name, tokens=piece.tokens)
                    found[piece.key] = Movable(name, domain, first, is_exact)
            if not gone:
                return list(found.values())
        return []

    def forget(self, key: Key) -> None:
        """The chunk has left, and was none of ours."""
        if self._content is not None:
            self._content.drop(key)

    def _usable(self, wanted: Sequence[MovedPiece]) -> list[Piece]:
        """Up to the first that is only just being saved."""
        found: list[Piece] = []
        for moved in wanted:
            chunk = self._index.get(moved.key)
            if chunk is None or not chunk.usable:
                break
            piece = Piece(chunk, moved.start, moved.stop, first=moved.first, tokens=moved.tokens)
            found.append(piece)
        return found
