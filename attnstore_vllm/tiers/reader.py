# SPDX-License-Identifier: Apache-2.0
"""A tier behind -> DRAM: what waiting requests want is read, nearest first, and verified.

    look-ahead -> begin_fetch -> the tier reads and verifies -> READY, waiters are told

A chunk is read from the nearest tier that has it and answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError, GoneError
from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.policy.cost import read_pays
from attnstore_vllm.policy.lookahead import LAST, QueuePlace
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.remote import is_believed
from attnstore_vllm.tiers.tier_io import TierIo
from attnstore_vllm.types import Cause, Event

WANTED_MAX = 65536
"""Chunks that may be queued for no request in particular."""


class Reader:
    """See the module. Methods marked *locked* are called with the store's lock held.

    Args:
        tiers: nearest first.
    """

    def __init__(self, context: Context, tiers: Sequence[TierIo]) -> None:
        self._context = context
        self._tiers = tiers
        self._wanted: OrderedDict[Chunk, None] = OrderedDict()
        self.lacks_room = False
        """DRAM had no room for the read that was to begin last."""
        self.needs_all = False
        """A part of what a request wants is of no use: its hit ends in several groups."""
        self.computing_s: Callable[[int, int], float | None] = lambda start, stop: None
        """Seconds for computing tokens [start, stop) of a prompt; None: it is not known, or all
        that is stored is waited for. From any thread."""

    @property
    def is_busy(self) -> bool:
        """Locked."""
        return self.num_reading > 0 or self._next() is not None

    @property
    def num_reading(self) -> int:
        """Locked."""
        return sum(tier.num_loading for tier in self._tiers)

    def source(self, chunk: Chunk) -> TierIo | None:
        """Locked. The tier to read the chunk from; None if none that has it answers."""
        for tier in self._tiers:
            if chunk.at(tier.tier.name).state is State.READY and tier.health.reads.in_use:
                return tier
        return None

    def can_bring(self, chunk: Chunk) -> bool:
        """Locked. Whether a tier that answers has the chunk, and is believed to."""
        return self.source(chunk) is not None and is_believed(self._context.residency, chunk)

    def why_short(self, sequence: SequenceKeys, at: int, stop: int, min_tokens: int) -> Cause:
        """Why a look-up of tokens [.., stop) has found nothing behind the first `at`. From the
        scheduler's thread. Cost: a look at one chunk, and at the tails that are like it."""
        size = sequence.chunk_tokens
        with self._context.progress:
            index = self._context.residency.index
            number = at // size
            whole = index.get(sequence.key(number)) if (number + 1) * size <= stop else None
            there = index.ends_like(sequence, number, stop) if whole is None else [whole]
            there = [chunk for chunk in there if chunk.usable]
            is_here = [chunk.dram.state is State.READY for chunk in there]
            if there and not any(is_here) and not any(map(self.can_bring, there)):
                return Cause.OUT_OF_USE
            if whole in there:
                is_short = (number + 1) * size - at < min_tokens
                return Cause.TOO_SHORT if is_short else Cause.DRAM_TOO_SMALL
            is_known = all(tier.is_at_rest for tier in self._tiers)
            return Cause.NOT_STORED if is_known else Cause.RECOVERING

    def want(self, chunks: Iterable[Chunk]) -> None:
        """Locked. Queue chunks that no waiting request wants, after all that one does."""
        for chunk in chunks:
            if len(self._wanted) < WANTED_MAX:
                self._wanted.setdefault(chunk)

    def arrivals(self, request_id: str, chunks: Sequence[Chunk]) -> list[float] | None:
        """Locked. Seconds until each of a waiting request's chunks is in DRAM, rising; None as long
        as one of the tiers that they come from is not known.

        What is in flight and what nearer requests want comes before them; without a place in the
        queue, what was wanted earlier. What was given up for the request never comes.
        """
        flying = self.num_reading
        look_ahead = self._context.residency.look_ahead
        ahead = flying + look_ahead.num_absent_before(request_id)
        if request_id not in look_ahead:
            mine = set(chunks)
            ahead += next((i for i, c in enumerate(self._wanted) if c in mine), 0)
        is_given_up = request_id in look_ahead and not look_ahead.has_missing(request_id)
        arrivals, latest = [], 0.0
        for chunk in chunks:
            if chunk.dram.state in (State.READING, State.ABSENT):
                cost = (self.source(chunk) or self._tiers[0]).cost
                if cost.mean_s is None:
                    return None
                is_absent = chunk.dram.state is State.ABSENT
                ahead += is_absent
                latest = max(latest, cost.seconds(ahead if is_absent else flying))
                latest = math.inf if is_absent and is_given_up else latest
            arrivals.append(latest)
        return arrivals

    def forget_wanted(self) -> None:
        """Locked."""
        self._wanted.clear()
        self._context.residency.look_ahead.stop_fetching()

    def _next(self) -> tuple[Chunk, TierIo, QueuePlace] | None:
        """Locked. What is to be read next, from where, and for whom."""
        look_ahead = self._context.residency.look_ahead
        while any(tier.health.reads.in_use for tier in self._tiers):
            found = look_ahead.next_to_fetch()
            if found is None and self._wanted:
                found = next(iter(self._wanted)), LAST
            if found is None:
                break
            chunk, whose = found
            source = self.source(chunk)
            if not chunk.dropped and chunk.dram.state is State.ABSENT and source is not None:
                if whose is LAST or self._pays(chunk, source, whose[2]):
                    return chunk, source, whose
                look_ahead.give_up(whose[2])
                continue
            self._wanted.pop(chunk, None)
            look_ahead.has_come(chunk)
        return None

    def _pays(self, chunk: Chunk, source: TierIo, request_id: str) -> bool:
        """Whether the request may have the chunk before it would have computed it. Cost: where
        reading is not sooner at once, a look at all that it wants."""
        residency, read_s = self._context.residency, source.cost.mean_s
        if read_s is None:
            return True
        look_ahead, flying = residency.look_ahead, self.num_reading
        turn_s = (1 + look_ahead.num_before(request_id)) * residency.dram.pace.mean_s
        start, stop = _span((chunk,))
        own_s = self.computing_s(start, stop)
        if own_s is None or (flying + 1) * read_s <= turn_s + own_s:
            return True
        wanted = look_ahead.wants_of(request_id)
        missing = [chunk for chunk in wanted if chunk.dram.state is not State.READY]
        num_reads = flying + sum(chunk.dram.state is State.ABSENT for chunk in missing)
        # What is there behind a gap is of use once the gap is closed.
        first, last = _span(wanted if self.needs_all else missing)[0], _span(wanted)[1]
        here_s, all_s = self.computing_s(first, stop), self.computing_s(first, last)
        assert here_s is not None
        assert all_s is not None
        if self.needs_all:
            return read_pays((num_reads, num_reads), read_s, turn_s, (all_s, all_s))
        return read_pays((flying + 1, num_reads), read_s, turn_s, (here_s, all_s))

    def start(self) -> None:
        """Submit reads up to the depth. From any thread; waits for nothing."""
        context = self._context
        residency = context.residency
        begun: set[TierIo] = set()
        with context.progress:
            residency.now = context.clock()
            while (found := self._next()) is not None:
                chunk, source, whose = found
                if source.loads_last or not source.can_load:
                    break
                self.lacks_room = not residency.begin_fetch(chunk, source.tier, whose)
                if self.lacks_room:
                    break  # tried again when something has ended
                self._wanted.pop(chunk, None)
                source.begin_load(
                    chunk,
                    context.pool.slot(chunk.dram.slot),
                    partial(self._finish, chunk, source, residency.now),
                    partial(self._give_up, chunk),
                )
                begun.add(source)
        for source in begun:
            source.submit()

    def _finish(
        self,
        chunk: Chunk,
        source: TierIo,
        begun_at: float,
        failure: AttnStoreError | None,
        tokens: bytes,
    ) -> None:
        """Locked."""
        context = self._context
        is_corrupt = isinstance(failure, CorruptRecordError)
        if failure is None or is_corrupt:
            now = context.clock()
            context.moved_bytes[source.flow_up] += source.record_bytes
            source.cost.observe(now - max(begun_at, source.load_ended_at))
            source.load_ended_at = now
        verified = failure is None and context.residency.index.learn(chunk, tokens)
        context.num_copied += verified and source.tier.is_remote
        # A remote tier may have given another server's copy: that sum is of what was put there.
        if source.sums_payloads and not source.tier.is_remote:
            chunk.dram.checksum = source.tier.copy_of(chunk).checksum
        if not verified and not chunk.dropped:  # else it was counted, or is not wanted
            event = source.corrupt if failure is None or is_corrupt else source.read_failed
            event = Event.GONE if isinstance(failure, GoneError) else event
            context.residency.counts[event] += 1
        context.residency.finish_fetch(chunk, verified)
        context.progress.notify_all()

    def _give_up(self, chunk: Chunk) -> None:
        """The read is late. Requests that wait for the chunk compute."""
        context = self._context
        with context.progress:
            context.residency.counts[Event.READ_LATE] += 1
            context.residency.drop(chunk)
            context.progress.notify_all()


def _span(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """The positions between the first token of these and the last."""
    names = [chunk.name for chunk in chunks]
    return min(n.position for n in names), max(n.position + n.num_tokens for n in names)
