# SPDX-License-Identifier: Apache-2.0
"""How many prompt tokens DRAM of other sizes would have held: a hit curve by sampling.

SHARDS (Waldspurger et al., FAST'15): of all chunks only those are followed whose key, taken as a
number, is below a threshold. Of each use of one its distance is noted: how many chunks were used
since its last use, sampled ones over the sampling rate. A pool that lets the least recently used
chunk go first has it if it has more slots than that. So one pass says it for all sizes. When more
than SAMPLED_MAX chunks are followed, the threshold sinks, and the largest numbers are let go.

    uses     [ oldest | ... | newest ]        by the time of their last use
    distance of a chunk = what stands right of it, over the rate

Within a request the last chunk counts as used first, as in the tiers: so a request that finds a
chunk finds all that are before it.

A conversation ends within a chunk, and its next turn goes on there (tails.py). Its *tail* takes a
slot and has a key of its own, so it is sampled as any chunk is. The next turn finds the tail's
tokens. Then what was made of it takes its place: the longer tail, or the whole chunk, each sampled
by its own key. So slots and tokens are both right on average, though of a tail and of what follows
it one alone may be followed. Pure: no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple

from attnstore_vllm.policy.lazy_heap import LazyHeap
from attnstore_vllm.policy.tails import Tails
from attnstore_vllm.types import TOKEN_BYTES

CURVE_TIMES = (0.25, 0.5, 1, 2, 4, 8)
"""The sizes that a server asks about: so many times its DRAM."""
SAMPLED_MAX = 8192
TOKENS_KEPT = 1 << 31
"""About so many prompt tokens count; what was before is forgotten by halves."""
NEWS_MAX = 4096
"""Events that wait for being counted; beyond, the oldest does not count."""
_ALL = 1 << 64


def mark_of(key: bytes) -> int:
    """A key's first 64 bits: the number that says whether it is followed."""
    return int.from_bytes(key[:8], "big")


def _unknown(_: int) -> tuple[bytes, bytes]:
    return b"", b""


class LookedUp(NamedTuple):
    """A request has looked these up, in the order of depth, and has all of them afterwards."""

    root: int
    """The mark of what its first chunk continues."""
    chunks: Sequence[int]
    """The marks of the whole ones of its prompt."""
    num_tokens: int
    """All tokens of its prompt."""
    part: Callable[[int], tuple[bytes, bytes]] = _unknown
    """The extra and the encoded tokens of a chunk of the prompt, the last one's as far as they may
    be found. No tokens: they are not known any more. Asked for where a tail is followed alone."""


class NewChunk(NamedTuple):
    """A chunk was computed, or the tail of one."""

    key: bytes
    parent: bytes
    extra: bytes
    tokens: bytes
    """Encoded."""


class HitCurve:
    """The share of prompt tokens that pools of several sizes would have.

    Args:
        sizes: in chunks.
        chunk_tokens: of a chunk.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        chunk_tokens: int,
        *,
        sampled_max: int = SAMPLED_MAX,
        tokens_kept: int = TOKENS_KEPT,
    ) -> None:
        self._sizes = list(sizes)
        self._chunk_tokens = chunk_tokens
        self._sampled_max = sampled_max
        self._tokens_kept = tokens_kept
        self.news: deque[LookedUp | NewChunk] = deque(maxlen=NEWS_MAX)
        """For catch_up(), of who has no time for use() and store() now."""
        self._threshold = _ALL
        self.used_at: dict[int, int] = {}
        """The number of the last use of each followed chunk."""
        self._times: list[int] = []
        """Those numbers, in order."""
        self._largest = LazyHeap[int](self._rank_of)
        """Followed chunks, largest first."""
        self._tails = Tails()
        """The tails among the followed chunks."""
        self._now = 0
        self._hits = [0.0] * len(self._sizes)
        """Whole chunks that were found."""
        self._tail_hits = [0.0] * len(self._sizes)
        """Tokens that were found in tails."""
        self._looked_up = 0.0
        """Chunks, of those that are followed, over the rate at their time."""
        self._chunks = 0.0
        """All chunks that were looked up."""
        self._tokens = 0.0

    @classmethod
    def around(cls, num_slots: int, chunk_tokens: int) -> HitCurve:
        """A curve of pools of CURVE_TIMES so many slots."""
        return cls([max(1, int(times * num_slots)) for times in CURVE_TIMES], chunk_tokens)

    def by_times(self) -> list[tuple[str, float]]:
        """shares() by the name of each of CURVE_TIMES, to a thousandth. Counts the news first."""
        self.catch_up()
        return [
            (f"{times:g}", round(share, 3))
            for times, share in zip(CURVE_TIMES, self.shares(), strict=True)
        ]

    def catch_up(self, most: int = NEWS_MAX) -> None:
        """Count so many of the news, in the order in which they came."""
        for _ in range(min(most, len(self.news))):
            new = self.news.popleft()
            if isinstance(new, LookedUp):
                self.use(new)
            else:
                self.store(new)

    def use(self, used: LookedUp) -> None:
        """Cost: two comparisons a chunk, and some microseconds for each that is followed."""
        chunks = used.chunks
        self._chunks += len(chunks)
        self._tokens += used.num_tokens
        if self._tokens > self._tokens_kept:
            self._forget()
        threshold = self._threshold
        followed = [chunk for chunk in chunks if chunk < threshold]
        weight = _ALL / threshold
        self._looked_up += weight * len(followed)
        for chunk in followed:
            self._find(chunk, self._hits, weight, weight)
        self._use_tails(used, weight)
        for chunk in reversed(followed):
            self._touch(chunk)

    def store(self, new: NewChunk) -> None:
        """The first use of a chunk that no request has looked up: part of an answer. The tail that
        it goes on from has left."""
        place, mark = mark_of(new.parent), mark_of(new.key)
        for tail, _ in self._tails.heads_of(place, new.extra, new.tokens):
            if tail != mark:
                self._leave(tail)
        if mark >= self._threshold or mark in self.used_at:
            return
        if len(new.tokens) < self._chunk_tokens * TOKEN_BYTES:
            self._tails.add(mark, place, new.extra, new.tokens)
        self._touch(mark)

    def _use_tails(self, used: LookedUp, weight: float) -> None:
        """Find the tails that the request goes on from."""
        places = (used.root, *used.chunks)
        for number in self._tails.among(places):
            heads = self._tails.heads_of(places[number], *used.part(number))
            for tail, num_tokens in heads[:1]:
                self._find(tail, self._tail_hits, num_tokens * weight, weight)
                if number == len(used.chunks):  # the request's own tail is stored when it ends
                    self._touch(tail)
            if number < len(used.chunks):
                for tail, _ in heads:
                    self._leave(tail)

    def _find(self, chunk: int, hits: list[float], found: float, weight: float) -> None:
        """Count so much for each size that would have the chunk."""
        at = self.used_at.get(chunk)
        if at is None:
            return
        distance = (len(self._times) - bisect_left(self._times, at) - 1) * weight
        for number, size in enumerate(self._sizes):
            if distance < size:
                hits[number] += found

    def shares(self) -> list[float]:
        """The part of all prompt tokens that a pool of each size would have had, 0 to 1."""
        if not self._tokens:
            return [0.0] * len(self._sizes)
        # Some chunks are in every request: whether they are followed or not would move all of the
        # curve. What is missing or too much is taken to be of them (SHARDS-adj).
        surplus = self._chunks - self._looked_up
        whole = (max(0.0, hit + surplus if hit else 0.0) for hit in self._hits)
        hits = map(add, (hit * self._chunk_tokens for hit in whole), self._tail_hits)
        return [min(1.0, hit / self._tokens) for hit in hits]

    def _touch(self, chunk: int) -> None:
        at = self.used_at.get(chunk)
        if at is None:
            self._largest.push(-chunk, chunk)
        else:
            del self._times[bisect_left(self._times, at)]
        self._now += 1
        self.used_at[chunk] = self._now
        self._times.append(self._now)
        if len(self.used_at) > self._sampled_max:
            self._lower()

    def _leave(self, chunk: int) -> None:
        """It has no slot any more."""
        del self._times[bisect_left(self._times, self.used_at.pop(chunk))]
        self._tails.remove(chunk)

    def _rank_of(self, chunk: int) -> int | None:
        return -chunk if chunk in self.used_at else None

    def _lower(self) -> None:
        """Follow fewer: the largest goes, and all that are as large from now on."""
        largest = self._largest.first()
        assert largest is not None
        self._threshold = largest
        self._leave(largest)

    def _forget(self) -> None:
        self._hits = [hit / 2 for hit in self._hits]
        self._tail_hits = [hit / 2 for hit in self._tail_hits]
        self._looked_up, self._chunks, self._tokens = (
            self._looked_up / 2,
            self._chunks / 2,
            self._tokens / 2,
        )
