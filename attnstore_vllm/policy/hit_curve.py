# SPDX-License-Identifier: Apache-2.0
"""How many prompt tokens DRAM of other sizes would have held: a hit curve by sampling.

SHARDS (Waldspurger et al., FAST'15): of all chunks only those are followed whose key, taken as a
number, is below a threshold. Of each use of one its distance is noted: how many chunks were used
since its last use, sampled ones over the sampling rate. A pool that lets the least recently used
chunk go first has it if it has more slots than that. So one pass says it for all sizes. When more
than SAMPLED_MAX chunks are followed, the threshold sinks, and the largest numbers are let go.

    uses     [ oldest | ... | newest ]        by the time of their last use
    distance of a chunk = what stands right of it, over the rate

Within a request the last chunk counts as used first, as in the tiers: so whoever finds a chunk
finds all that are before it. Pure: no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

CURVE_TIMES = (0.25, 0.5, 1, 2, 4, 8)
"""The sizes that a server asks about: so many times its DRAM."""
SAMPLED_MAX = 8192
TOKENS_KEPT = 1 << 31
"""About so many prompt tokens count; what was before is forgotten by halves."""
NEWS_MAX = 4096
"""Events that wait for being counted; beyond, the oldest does not count."""
_ALL = 1 << 64


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
        self.news: deque[tuple[Sequence[int] | bytes, int]] = deque(maxlen=NEWS_MAX)
        """Arguments of use() and store() for catch_up(), for who has no time for them now."""
        self._threshold = _ALL
        self._used_at: dict[int, int] = {}
        """The number of the last use of each followed chunk."""
        self._times: list[int] = []
        """Those numbers, in order."""
        self._largest: list[int] = []
        """A heap of followed chunks, largest first: negated."""
        self._now = 0
        self._hits = [0.0] * len(self._sizes)
        self._looked_up = 0.0
        """Chunks, of those that are followed, over the rate at their time."""
        self._chunks = 0.0
        """All chunks that were looked up."""
        self._tokens = 0.0

    @property
    def num_followed(self) -> int:
        """Chunks that are followed now."""
        return len(self._used_at)

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
            chunks, num_tokens = self.news.popleft()
            if isinstance(chunks, bytes):
                self.store(chunks, num_tokens)
            else:
                self.use(chunks, num_tokens)

    def use(self, chunks: Sequence[int], num_tokens: int) -> None:
        """A request looks these up, in the order of depth, and has all of them afterwards.

        Args:
            chunks: whole ones of its prompt, each as the first 64 bits of its key.
            num_tokens: of its prompt.
        Cost: a comparison a chunk, and some microseconds for each that is followed.
        """
        self._chunks += len(chunks)
        self._tokens += num_tokens
        if self._tokens > self._tokens_kept:
            self._forget()
        threshold = self._threshold
        followed = [chunk for chunk in chunks if chunk < threshold]
        weight = _ALL / threshold
        self._looked_up += weight * len(followed)
        for chunk in followed:
            at = self._used_at.get(chunk)
            if at is None:
                continue
            distance = (len(self._times) - bisect_left(self._times, at) - 1) * weight
            for number, size in enumerate(self._sizes):
                if distance < size:
                    self._hits[number] += weight
        for chunk in reversed(followed):
            self._touch(chunk)

    def store(self, key: bytes, num_tokens: int) -> None:
        """A chunk was computed. Of a whole one that no request has looked up, part of an answer,
        this is the first use."""
        chunk = int.from_bytes(key[:8], "big")
        is_followed = chunk < self._threshold and num_tokens == self._chunk_tokens
        if is_followed and chunk not in self._used_at:
            self._touch(chunk)

    def shares(self) -> list[float]:
        """The part of all prompt tokens that a pool of each size would have had, 0 to 1."""
        if not self._tokens:
            return [0.0] * len(self._sizes)
        # Some chunks are in every request: whether they are followed or not would move all of the
        # curve. What is missing or too much is taken to be of them (SHARDS-adj).
        surplus = self._chunks - self._looked_up
        hits = (max(0.0, hit + surplus if hit else 0.0) for hit in self._hits)
        return [min(1.0, hit * self._chunk_tokens / self._tokens) for hit in hits]

    def _touch(self, chunk: int) -> None:
        at = self._used_at.get(chunk)
        if at is None:
            heappush(self._largest, -chunk)
        else:
            del self._times[bisect_left(self._times, at)]
        self._now += 1
        self._used_at[chunk] = self._now
        self._times.append(self._now)
        if len(self._used_at) > self._sampled_max:
            self._lower()

    def _lower(self) -> None:
        """Follow fewer: the largest goes, and whatever is as large from now on."""
        largest = -heappop(self._largest)
        self._threshold = largest
        del self._times[bisect_left(self._times, self._used_at.pop(largest))]

    def _forget(self) -> None:
        self._hits = [hit / 2 for hit in self._hits]
        self._looked_up, self._chunks, self._tokens = (
            self._looked_up / 2,
            self._chunks / 2,
            self._tokens / 2,
        )
