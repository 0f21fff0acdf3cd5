# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks continue a prefix: by key for whole chunks, by tokens inside one.

Chunks that continue the same prefix are siblings. They are kept in the order of their tokens,
and of all strings in an order the one with the longest common prefix with a given one stands
beside the place where that one would stand. So the best partly matching chunk is found by one
binary search among any number of siblings, and no prompt can make a lookup slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.types import TOKEN_BYTES, Key

NEIGHBOURS_MAX = 32
"""Siblings that are looked at for tails to supersede; what is missed goes by eviction."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a request's tokens, [start, stop), whose KV one stored chunk has."""

    chunk: Chunk
    start: int
    stop: int


def common_tokens(a: bytes, b: bytes) -> int:
    """The number of leading tokens that two encoded token strings share."""
    stop = min(len(a), len(b))
    if a[:stop] == b[:stop]:
        return stop // TOKEN_BYTES
    low, high = 0, stop // TOKEN_BYTES  # low tokens agree, high tokens do not
    while high - low > 1:
        middle = (low + high) // 2
        at = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        low, high = (middle, high) if a[at] == b[at] else (low, middle)
    return low


class _Siblings:
    """The chunks after one prefix, by tokens. Two parallel lists, since bisect wants bare keys."""

    __slots__ = ("chunks", "tokens")

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.chunks: list[Chunk] = []


class PrefixIndex:
    """All chunks that some tier has or is getting. No chunk is in it twice."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Chunk] = {}
        self._siblings: dict[tuple[Key, bytes], _Siblings] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._by_key.values())

    def get(self, key: Key) -> Chunk | None:
        return self._by_key.get(key)

    def add(self, chunk: Chunk) -> None:
        name = chunk.name
        assert name.key not in self._by_key
        self._by_key[name.key] = chunk
        group = self._siblings.setdefault((name.parent, name.extra), _Siblings())
        at = bisect_left(group.tokens, name.tokens)
        group.tokens.insert(at, name.tokens)
        group.chunks.insert(at, chunk)

    def remove(self, chunk: Chunk) -> None:
        name = chunk.name
        assert self._by_key.pop(name.key) is chunk
        group = self._siblings[name.parent, name.extra]
        at = bisect_left(group.tokens, name.tokens)
        assert group.chunks[at] is chunk
        del group.tokens[at], group.chunks[at]
        if not group.chunks:
            del self._siblings[name.parent, name.extra]

    def extends(self, name: ChunkName) -> bool:
        """Whether a sibling already holds all the tokens of `name`, and more."""
        group = self._siblings.get((name.parent, name.extra))
        if group is None:
            return False
        at = bisect_left(group.tokens, name.tokens)
        return at < len(group.tokens) and group.tokens[at].startswith(name.tokens)

    def extended_by(self, name: ChunkName) -> list[Chunk]:
        """The siblings whose tokens `name` holds all of, and more: tails it supersedes."""
        group = self._siblings.get((name.parent, name.extra))
        if group is None:
            return []
        at = bisect_left(group.tokens, name.tokens)
        before = range(max(0, at - NEIGHBOURS_MAX), at)
        return [group.chunks[i] for i in before if name.tokens.startswith(group.tokens[i])]

    def best_match(self, parent: Key, extra: bytes, tokens: bytes) -> tuple[Chunk, int] | None:
        """The usable chunk after `parent` that shares most leading tokens, and how many."""
        group = self._siblings.get((parent, extra))
        if group is None:
            return None
        at = bisect_left(group.tokens, tokens)
        best: tuple[Chunk, int] | None = None
        for i in (at, at - 1):
            if 0 <= i < len(group.chunks) and group.chunks[i].usable:
                shared = common_tokens(group.tokens[i], tokens)
                if shared and (best is None or shared > best[1]):
                    best = group.chunks[i], shared
        return best

    def match(self, sequence: SequenceKeys, start: int, stop: int) -> list[Piece]:
        """The longest run of usable chunks for the tokens [start, stop) of a sequence.

        Chunks before `start` are not needed: a key names the whole prefix, wherever the KV of
        that prefix is. The run ends at the first chunk that is not there, or is there in part.

        Cost: a dict lookup a chunk and one binary search; the tokens of one chunk are encoded.
        """
        size = sequence.chunk_tokens
        pieces: list[Piece] = []
        while start < stop:
            number = start // size
            first, last = number * size, (number + 1) * size
            if last <= len(sequence.token_ids):
                chunk = self._by_key.get(sequence.key(number))
                if chunk is not None and chunk.usable:
                    pieces.append(Piece(chunk, start, min(last, stop)))
                    start = min(last, stop)
                    continue
            tokens = sequence.tokens(first, min(last, stop))
            best = self.best_match(sequence.parent(number), sequence.extra(number), tokens)
            if best is not None and first + best[1] > start:
                pieces.append(Piece(best[0], start, min(first + best[1], stop)))
            break
        return pieces
