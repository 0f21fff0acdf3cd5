# SPDX-License-Identifier: Apache-2.0
"""Which sessions keep their blocks in HBM between two turns, and which new ones wait. Pure: time
is given.

An agent's session comes back when its tool has run. To hold its n tokens of N in HBM for h seconds

    saves   P(gap <= h) * s             s: loading or computing them again on its return
    costs   E[min(gap, h)] * n / N      seconds of the whole HBM, which others could have used

The h with the most left is how long a session is held, and it is 0 where none pays. Gaps are
learned from all sessions. s is computing, times what the returns of others would have cost over
computing: a tier that still has their KV by then makes it small.

A hold is bounded by its end, by the longest one, and by the share of HBM that all have. It is let
go at once when a request has no room: what is expected to gain least a second first.

Blocks that several sessions share are counted once: who has them says what is in use and held.

Sessions that come back after they lost their blocks thrash: each takes the room of the next. So one
that is out of play waits at the door while those in play may grow to all of that share, and no
longer than its deadline. Each may grow to what is usual, and at most to twice what it has: so long
ones do not close the door to short ones. A session's first request never waits there, and it is not
held while there is no room for one more. So the wait of new sessions under overload is before their
second request. Where no hold pays, or a tier makes returns cheap, no request waits.

Source: Continuum (arXiv 2511.02230) holds for a time to live of the same form.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

import numpy as np

from attnstore_vllm.policy.gaps import ENDS_S, RETURNS_KEPT, Gaps
from attnstore_vllm.policy.lazy_heap import LazyHeap

DOOR_RATIO = 0.5
"""Where the return of a lost session costs less than this part of computing it, none waits: loads
hide behind what others compute, so that waiting for HBM costs more than it saves."""
SHORT_S = 30.0
"""So long after a session was let go for others HBM counts as too small for all."""
USUAL_TURNS = 64
"""About so many count for how long a session's requests are."""
SESSIONS_MAX = 4096
"""Sessions that are followed while they are away. The oldest is given up for a new one."""
LOOKS = 256
"""Holds that are put in order at once, to be let go: those that are away for longest. They are the
next to go, until a step is over. Of one-block sessions there may be thousands."""
OVER_MAX = 256
"""Holds whose end is seen in one step."""


class ReturnCost:
    """The cost of a return whose blocks are lost, over computing all of its history: below 1 where
    a tier has it."""

    def __init__(self) -> None:
        self._seconds = self._computing_s = 0.0

    def observe(self, computing_s: float, return_s: float) -> None:
        """A session has come back, held or not.

        Args:
            computing_s: for all of its history.
            return_s: for loading what tiers have of it, and computing the rest.
        """
        keep = 1 - 1 / RETURNS_KEPT
        self._seconds = keep * self._seconds + return_s
        self._computing_s = keep * self._computing_s + computing_s

    @property
    def ratio(self) -> float:
        """Before any has come back all is computed."""
        return self._seconds / self._computing_s if self._computing_s else 1.0


@dataclass(slots=True)
class _Held:
    num_tokens: int
    since: float
    until: float
    last: float
    """No longer in any case, also while its session waits for room."""
    saves_s: float


class Holding:
    """See the module. Sessions are told by any number; calls come in the order of time.

    Args:
        room_tokens: of the HBM that requests share.
        share: of it that may be held, and that sessions in play may grow to.
        longest_s: that a session is held.
        defer_s: that a session waits at the door, at most; 0: none waits.
    """

    def __init__(
        self,
        room_tokens: int,
        *,
        share: float = 0.9,
        longest_s: float = 30.0,
        defer_s: float = 60.0,
    ) -> None:
        assert room_tokens > 0 and 0 <= share <= 1
        self._room = room_tokens
        self._most = int(share * room_tokens)
        self._longest_s = longest_s
        self._defer_s = defer_s
        self._gaps = Gaps()
        self.return_cost = ReturnCost()
        self._is_fitted = True
        self._held: dict[int, _Held] = {}
        self._idle: dict[int, None] = {}
        """Those of them that are away, the one that left first first."""
        self._back: dict[int, None] = {}
        """Those of them that have come back, and wait for room."""
        self._ends = LazyHeap[int](self._until)
        self._order: list[int] = []
        """Held, and to be let go next from its end on. Emptied where that may be another."""
        self._away: OrderedDict[int, float] = OrderedDict()
        """When each left, of those that are followed."""
        self._copies: OrderedDict[int, float] = OrderedDict()
        """The same of copies. Gaps are learned of those that come back alone: one of many answers
        goes on."""
        self._waiting: set[int] = set()
        """Sessions that have come back and have no room yet."""
        self._growing: dict[int, int] = {}
        """Tokens by which the sessions in play may grow: those that run, and those that are held.
        As it was when they started, or were held."""
        self._growth = 0
        """The sum of them."""
        self._first: set[int] = set()
        """Those of them in their first turn."""
        self.usual_tokens = 0.0
        self._pays = False
        self.let_go_at = -math.inf

    def __contains__(self, session: int) -> bool:
        return session in self._held

    # ---- the door ----------------------------------------------------------------------

    def came(self, session: int, now: float) -> None:
        """A request of the session waits."""
        left_at = self._away.pop(session, self._copies.pop(session, None))
        if left_at is None:
            return
        self._waiting.add(session)
        if session in self._held:  # until it has room, and no longer
            self._held[session].until = self._held[session].last
            del self._idle[session]
            self._back[session] = None
            self._order.clear()
        if self._gaps.observe(now - left_at):
            self._is_fitted = False

    def is_admitted(
        self, session: int, num_tokens: int, in_use: int, waited_s: float, now: float
    ) -> bool:
        """Whether a request of so many tokens may start. Asked again each step. Cost: O(1).

        Args:
            in_use: tokens that running requests and holds have in HBM, each block counted once.
        """
        is_out = session in self._waiting and session not in self._growing
        if not is_out or waited_s >= self._defer_s or not self._is_guarded(now):
            return True
        return not in_use or self._fits(in_use + num_tokens, num_tokens)

    def _is_guarded(self, now: float) -> bool:
        """Whether sessions wait at the door: holds pay, tiers do not make up for their loss, and
        one was let go lately."""
        is_short = now - self.let_go_at < SHORT_S
        return is_short and self._pays and self.return_cost.ratio >= DOOR_RATIO

    def _fits(self, in_use: int, num_tokens: int) -> bool:
        """Whether one more session of so many tokens can be in play.

        Args:
            in_use: its own, too.
        """
        return in_use + self._growth + self._grows(num_tokens) <= self._most

    def _grows(self, num_tokens: int) -> int:
        """By how much a session of so many tokens may grow."""
        return min(max(0, int(self.usual_tokens) - num_tokens), num_tokens)

    def started(
        self, session: int, num_tokens: int, computing_s: float = 0.0, return_s: float = 0.0
    ) -> None:
        """A request has its room. What was held for it is its own again.

        Args:
            computing_s, return_s: as in ReturnCost.observe(); 0 of a first turn.
        """
        self._leave(session)
        if session not in self._waiting:
            self._first.add(session)
        self._waiting.discard(session)
        self._join(session, num_tokens)
        self.return_cost.observe(computing_s, return_s)

    def gone(self, session: int) -> None:
        """The session is over, or its request was aborted. What was held for it is let go."""
        self._leave(session)
        self._waiting.discard(session)
        self._first.discard(session)
        self._copies.pop(session, None)
        if self._away.pop(session, None) is not None:
            self._gaps.gave_up()

    # ---- holding -----------------------------------------------------------------------

    def ended(
        self,
        session: int,
        num_tokens: int,
        computing_s: float,
        now: float,
        *,
        in_use: int,
        held: int,
        most_s: float = math.inf,
        is_copy: bool = False,
    ) -> bool:
        """A request has ended. Returns whether its blocks are held.

        Args:
            computing_s: for all of its tokens.
            in_use: as in is_admitted(), its own with them.
            held: tokens that are held with its own, each block counted once.
            most_s: how long they may be held.
            is_copy: another request of the same prompt has come before, and is learned from.
        """
        is_first = session in self._first
        self._first.discard(session)
        self._leave(session)
        if not is_copy:
            part = 1 / USUAL_TURNS if self.usual_tokens else 1.0
            self.usual_tokens += part * (num_tokens - self.usual_tokens)
        away = self._copies if is_copy else self._away
        away.pop(session, None)
        away[session] = now
        if len(away) > SESSIONS_MAX:
            away.popitem(last=False)
            if not is_copy:
                self._gaps.gave_up()
        self._fit(now)
        saves_s = computing_s * self.return_cost.ratio
        seconds = self.seconds(num_tokens, saves_s)
        self._pays = seconds > 0
        if not seconds or held > self._most:
            return False
        if is_first and self._is_guarded(now) and not self._fits(in_use, num_tokens):
            return False
        last = now + min(self._longest_s, most_s)
        until = min(now + seconds, last)
        self._held[session] = _Held(num_tokens, now, until, last, saves_s)
        self._idle[session] = None
        self._ends.push(until, session)
        self._order.clear()
        self._join(session, num_tokens)
        return True

    def seconds(self, num_tokens: int, saves_s: float) -> float:
        """How long so many tokens are worth to be held; 0: they are not."""
        if not self._gaps.is_known:
            return 0.0
        back, away_s = self._gaps.returned
        gain = back * saves_s - away_s * num_tokens / self._room
        gain[self._longest_s < ENDS_S] = -np.inf
        best = int(gain.argmax())
        return float(ENDS_S[best]) if gain[best] > 0 else 0.0

    def over(self, now: float) -> list[int]:
        """A step is over. Returns sessions whose time is over, at most OVER_MAX: they are held no
        more."""
        self._order.clear()
        over = self._ends.take(now, OVER_MAX)
        for session in over:
            self._leave(session)
        return over

    def let_go(self, now: float, number: int = 1, wanted_by: int | None = None) -> list[int]:
        """So many sessions that are held no more, since a request has no room: those that gain
        least a second, as far as LOOKS. Those that are back come last, and that of the request
        after them. Cost: of putting LOOKS in order, once for so many."""
        if not self._held:
            return []
        self.let_go_at = now
        self._fit(now)
        sessions: list[int] = []
        while self._held and len(sessions) < number:
            sessions.append(self._next(now, number, wanted_by))
            self._leave(sessions[-1])
        return sessions

    def _next(self, now: float, number: int, wanted_by: int | None) -> int:
        def worth(one: int) -> float:
            held = self._held[one]
            return self._gaps.rate(now - held.since) * held.saves_s / held.num_tokens

        while self._order:
            session = self._order.pop()
            if session in self._held and session != wanted_by:
                return session
        for some in (self._idle, self._back):
            first = [one for one in islice(some, max(number, LOOKS)) if one != wanted_by]
            if first:
                self._order = sorted(first, key=worth)[::-1]
                return self._order.pop()
        return next(iter(self._held))  # that of the request is left

    def _until(self, session: int) -> float | None:
        held = self._held.get(session)
        return None if held is None else held.until

    def _fit(self, now: float) -> None:
        """Learn gaps again if it is time: once however many have come back in a step."""
        if not self._is_fitted:
            self._is_fitted = True
            left_at = np.fromiter(self._away.values(), np.float64, len(self._away))
            self._gaps.fit(now - left_at)

    def _join(self, session: int, num_tokens: int) -> None:
        """The session is in play."""
        self._growing[session] = self._grows(num_tokens)
        self._growth += self._growing[session]

    def _leave(self, session: int) -> None:
        """The session is not in play."""
        if self._held.pop(session, None) is not None:
            self._idle.pop(session, None)
            self._back.pop(session, None)
        self._growth -= self._growing.pop(session, 0)
