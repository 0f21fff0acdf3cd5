# SPDX-License-Identifier: Apache-2.0
"""Remote tiers: a look-up that ends early asks them for the rest.

    look-up ends early -> Ask -> the tier's own thread answers -> entries in the index
                            \\_ the request is told "not yet", until then or the tier's deadline

One question a request and tier has all its missing chunks. A question is dropped where too many are
open, and where the tier fails: its breaker counts late answers as failures.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.reader import Reader
from attnstore_vllm.tiers.remote import Ask, Found, RemoteLookup, RemoteTier, end_leases, enter
from attnstore_vllm.tiers.tier_io import TierIo
from attnstore_vllm.types import Event

logger = logging.getLogger(__name__)

OPEN_MAX = 64
"""Questions that a tier has not answered; more are not asked."""
ASK_MIN_TOKENS = 32
"""Fewer tokens that are not stored here are computed without a question."""
ASKED_FOR_S = 2.0
"""After so long a request that still waits may ask again: what was found may have gone."""
ANSWERS_KEPT = 64
"""About so many answers make up the mean."""
WRONG_MAX = 4096
"""So many wrong chunks are remembered."""


class AnswerTime:
    """The usual time of an answer, in seconds."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._count = 0

    def observe(self, seconds: float) -> None:
        self._count = min(self._count + 1, ANSWERS_KEPT)
        self.mean_s += (seconds - self.mean_s) / self._count


def worth_asking(num_tokens: int, computing_s: float | None, answer_s: float) -> bool:
    """Whether so many tokens that are not stored here are worth a question.

    Args:
        computing_s: that computing them takes; None: it is not known.
        answer_s: that an answer usually takes, before anything is loaded.
    """
    return num_tokens >= ASK_MIN_TOKENS and (computing_s is None or computing_s > answer_s)


class AskError(AttnStoreError):
    """A tier has not answered a question."""


class RemoteIo(TierIo):
    """The I/O of one remote tier. As in TierIo, methods marked *locked* are called with the lock.

    ask() hands the question to a thread of the tier's own, which calls answer(). A subclass calls
    tick() of this class in its own.
    """

    answer_deadline_s: float
    """How long a request waits for an answer, at most."""
    lease_s: float
    """How long what was found is believed to be there."""
    loads_soon = False
    """Its loads are over in so few milliseconds that a request that is told "not yet" may as well
    hear of its answer with them. An end of each is told."""

    def __init__(self, context: Context, tier: RemoteTier) -> None:
        super().__init__()
        self.tier: RemoteTier = tier
        self.context = context
        self.answer_time = AnswerTime()
        self._open: deque[Ask] = deque()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        """Locked. Keys whose KV an audit has found wrong, though it comes as it was sent. Not taken
        from there before the next reset, or before this engine has written it over."""
        self.has_left = False
        """Locked. See leave()."""

    @abstractmethod
    def ask(self, ask: Ask) -> None:
        """Locked. Hand it to the tier's thread. Waits for nothing."""

    def weights_seen(self, same: bool | None) -> None:
        """Locked. See RemoteTiers.weights_seen()."""

    def look_up(self, lookup: RemoteLookup, at: int, stop: int, request_id: str = "") -> Ask | None:
        """Locked. Ask, if the tier answers; else None. While it is out of use, what is to show
        whether it works again is a question that is not waited for."""
        now = self.context.clock()
        reads = self.health.reads
        if len(self._open) >= OPEN_MAX or self.tier.is_lost or self.has_left:
            return None
        is_probe = not reads.in_use and reads.take_probe(now)
        if not (reads.in_use or is_probe):
            return None
        ask = Ask(lookup, at, stop, self.context.clock, request_id)
        ask.until += 0.0 if is_probe else self.answer_deadline_s
        self._open.append(ask)
        self.ask(ask)
        return ask

    def answer(self, ask: Ask, found: Iterable[Found]) -> None:
        """The tier has these chunks. From any thread, without the lock; also late."""
        context = self.context
        residency = context.residency
        with context.progress:
            if ask.is_over:  # a reset came: it would be KV of before
                return
            residency.now = now = context.clock()
            ask.is_over = True
            self.answer_time.observe(now - ask.asked_at)
            # What follows a wrong one is no hit.
            right = takewhile(lambda one: bytes(one.name.key) not in self._wrong, found)
            entered = [self._enter(chunk, now) for chunk in right]
            news = [chunk for chunk in entered if chunk is not None]
            is_wanted = news and ask.request_id in residency.look_ahead
            if is_wanted:  # it is read now, and not when the request is looked at next
                # A tail goes when what extends it has come, and with it all that is wanted behind.
                tails = residency.index.extended_by(news[0].name)
                wants = residency.look_ahead.wants_of(ask.request_id)
                known = [chunk for chunk in wants if chunk not in tails]
                residency.dram.want(ask.request_id, [*known, *news])
            is_late = self._is_late(ask, now)
            is_told = is_late and ask not in self._open  # tick() has seen it before
            residency.counts[Event.ANSWERS_LATE] += is_late and not is_told
        if is_wanted:
            context.reader.start()
        with context.progress:
            # Who wakes takes the processor from those who bring what it waits for.
            if not (self.loads_soon and is_wanted and self.num_loading):
                context.progress.notify_all()
        if not is_told:
            self.health.note_read(self._late() if is_late else None)

    def _enter(self, found: Found, now: float) -> Chunk | None:
        """Locked. None: it is no news."""
        residency, movable = self.context.residency, found.movable
        chunk = enter(residency, self.tier, found, now + self.lease_s, self.context.ttl_s)
        if movable is None or residency.index.get(found.name.key) is None:
            return chunk
        if chunk is not None or movable.is_exact:  # else we may know more of it than we are told
            self.context.moved.note(
                movable.name, movable.domain, movable.native_from, is_exact=movable.is_exact
            )
        return chunk

    def fail(self, ask: Ask, failure: AttnStoreError) -> None:
        """The tier cannot answer. From any thread, without the lock."""
        with self.context.progress:
            is_news, ask.is_over = not ask.is_over, True
            self.context.progress.notify_all()
        if is_news:
            self.health.note_read(failure)

    def tick(self) -> None:
        context = self.context
        with context.progress:
            context.residency.now = now = context.clock()
            end_leases(context.residency, self.tier, context.moved)
            if self.tier.has_ended(now):
                context.wake()  # the next tick goes on, and others get the lock between
            late = 0
            while self._open:
                ask = self._open[0]
                if not (ask.is_over or self._is_late(ask, now)):
                    break
                late += not ask.is_over
                self._open.popleft()
            context.residency.counts[Event.ANSWERS_LATE] += late
        for _ in range(late):
            self.health.note_read(self._late())

    def _is_late(self, ask: Ask, now: float) -> bool:
        return now > ask.asked_at + self.answer_deadline_s

    def _late(self) -> AskError:
        return AskError(f"{self.tier.name} has not answered in time")

    def gauges_now(self) -> dict[tuple[str, str], float]:
        return dict(self.gauges)  # entries are no bytes of ours

    def leave(self) -> None:
        self.has_left = True
        self.forget_asks()

    def forget(self, chunk: Chunk, failed: Callable[[], object]) -> None:
        """That it may be there is known no longer than its lease lasts, so that is not looked
        at."""
        self._wrong[bytes(chunk.name.key)] = None
        self._wrong.move_to_end(bytes(chunk.name.key))
        while len(self._wrong) > WRONG_MAX:
            self._wrong.popitem(last=False)

    def forget_asks(self) -> None:
        """Locked. A reset: what is answered from now on was asked before it, and what is there then
        is other KV."""
        self._wrong.clear()
        for ask in self._open:
            ask.is_over = True
        self._open.clear()
        self.health.reads.forget_probe()  # its answer would be one of these


class RemoteTiers:
    """All of them, nearest first: asks for requests. From the scheduler's thread."""

    def __init__(self, context: Context, tiers: Sequence[RemoteIo], reader: Reader) -> None:
        self._context = context
        self._tiers = tiers
        self._reader = reader

    def look(
        self,
        lookup: RemoteLookup,
        pieces: Sequence[Piece],
        start: int,
        stop: int,
        request_id: str | None,
    ) -> None:
        """Ask for what comes behind these pieces, unless that was asked a while ago.

        Args:
            request_id: that gets it if it waits in the queue; None: it is for none yet.
        """
        if not lookup.may_ask:
            return
        now = self._context.clock()
        if now < lookup.asked_at + ASKED_FOR_S:
            return
        plain = pieces
        if lookup.finds_moved:
            plain = list(takewhile(lambda piece: piece.first is None, pieces))
        at = plain[-1].stop if plain else start
        if at >= stop:
            return
        computing_s = self._reader.computing_s(at, stop)
        worth = [
            tier
            for tier in self._tiers
            if worth_asking(stop - at, computing_s, tier.answer_time.mean_s)
        ]
        if not worth:  # without the lock: it is so at every look at what is short
            return
        with self._context.progress:
            if lookup.finds_moved:  # what is moved begins at any token: say which
                placed = self._context.residency.index.match(lookup.keys, start, stop, grain=1)
                at = placed[-1].stop if placed else start
                if at >= stop:
                    return
            asks = [tier.look_up(lookup, at, stop, request_id or "") for tier in worth]
        asked = tuple(ask for ask in asks if ask is not None)
        if asked:  # else the next look may: at the first one the weights are not known yet
            lookup.asked_at, lookup.asked = now, asked

    def weights_seen(self, same: bool | None) -> None:
        """The workers have looked: are the weights what they were at the look before, or at the
        start? None: they cannot be seen."""
        with self._context.progress:
            for tier in self._tiers:
                tier.weights_seen(same)

    def leave(self) -> None:
        """Weights have changed in place: no name tells our KV from that of others any more. Until
        the next start nothing is shared."""
        with self._context.progress:
            for tier in self._tiers:
                tier.leave()
        logger.warning("weights have changed: this engine shares KV with no other any more")


def awaits_remote(lookup: RemoteLookup) -> bool:
    """Whether a tier that was asked for it may still answer in time."""
    for ask in lookup.asked:  # noqa: SIM110 - asked of every request, step after step
        if not ask.is_over and ask.clock() < ask.until:
            return True
    return False


def remote_tiers_of(
    context: Context, tiers: Iterable[TierIo], reader: Reader
) -> RemoteTiers | None:
    """None where no tier must be asked."""
    asked = [tier for tier in tiers if isinstance(tier, RemoteIo)]
    return RemoteTiers(context, asked, reader) if asked else None
