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

Sessions that come back after they lost their blocks thrash: each takes the room of the next. So one
that is out of play waits at the door while those in play may grow to all of that share, and no
longer than its deadline. A session's first request never waits there, and it is not held while
there is no room for one more. So the wait of new sessions under overload is before their second
request. Where no hold pays, or a tier makes returns cheap, no request waits.

Source: Continuum (arXiv 2511.02230) holds for a time to live of the same form.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]

FIRST_S = 0.0625
NUM_AGES = 32
ENDS_S = FIRST_S * 2.0 ** (np.arange(NUM_AGES) / 2)
"""Age b ends after so long; the last after 48 minutes, and what is older never comes back."""
_ENDS_S: list[float] = ENDS_S.tolist()
WIDTHS_S = np.diff(np.concatenate([[0.0], ENDS_S]))
RETURNS_MIN = 8
"""Before so many have come back nothing is held."""
RETURNS_KEPT = 512
"""About so many count."""
REFIT_RETURNS = 16
DOOR_RATIO = 0.5
"""Where the return of a lost session costs less than this part of computing it, none waits: loads
hide behind what others compute, so that waiting for HBM costs more than it saves."""
SHORT_S = 30.0
"""So long after a session was let go for others HBM counts as too small for all."""
USUAL_TURNS = 64
"""About so many count for how long a session's requests are."""
SESSIONS_MAX = 4096
"""Sessions that are followed while they are away. The oldest is given up for a new one."""


class Gaps:
    """How long sessions are away, of all that have left: those that never came back count."""

    def __init__(self) -> None:
        self._returned = np.zeros(NUM_AGES)
        self._departed = 0.0
        self._num_seen = 0
        self._hazard = np.zeros(NUM_AGES)
        self._rates = [0.0] * NUM_AGES
        self.is_known = False

    def observe(self, gap_s: float) -> bool:
        """A session has come back. Returns whether it is time for fit()."""
        age = bisect_right(_ENDS_S, gap_s)
        keep = 1 - 1 / RETURNS_KEPT
        self._returned *= keep
        self._departed *= keep
        if age < NUM_AGES:
            self._returned[age] += 1
        else:
            self._departed += 1
        self._num_seen += 1
        return self._num_seen >= RETURNS_MIN and self._num_seen % REFIT_RETURNS in (0, RETURNS_MIN)

    def gave_up(self) -> None:
        """One that was followed has not come back."""
        self._departed += 1

    def fit(self, away_s: _Array) -> None:
        """Learn the hazard of each age.

        Args:
            away_s: how long each session is away that has not come back yet.
        """
        reached = np.zeros(NUM_AGES)
        for age in np.searchsorted(ENDS_S, away_s, side="right"):
            reached[:age] += 1
        later = np.cumsum(self._returned[::-1])[::-1] + self._departed
        at_risk = later + reached
        self._hazard = np.divide(self._returned, at_risk, where=at_risk > 0, out=np.zeros(NUM_AGES))
        for age in range(NUM_AGES):
            back, away_s_more = self._ahead(age)
            self._rates[age] = float((back / away_s_more).max())
        self.is_known = True

    def returned(self) -> tuple[_Array, _Array]:
        """By age: the probability that a session is back by its end, and the seconds that it is
        away until then."""
        return self._ahead(0)

    def rate(self, age_s: float) -> float:
        """Returns a second of one that is away for so long, over the best time to wait."""
        return self._rates[min(bisect_right(_ENDS_S, age_s), NUM_AGES - 1)]

    def _ahead(self, first: int) -> tuple[_Array, _Array]:
        """As returned(), of one that has reached this age."""
        stays = np.cumprod(1 - self._hazard[first:], dtype=np.float64)
        before = np.concatenate([[1.0], stays[:-1]])
        # One that comes back within an age comes in its middle.
        return 1 - stays, np.cumsum(WIDTHS_S[first:] * (before + stays) / 2, dtype=np.float64)


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
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._away: OrderedDict[int, float] = OrderedDict()
        self._waiting: set[int] = set()
        """Sessions that have come back and have no room yet."""
        self._present: dict[int, int] = {}
        """Tokens of the sessions in play: those that run, and those that are held."""
        self._first: set[int] = set()
        """Those of them in their first turn."""
        self._in_play: float | None = 0.0
        """Tokens that they may grow to; None: to be counted."""
        self._usual_tokens = 0.0
        self._pays = False
        self.let_go_at = -math.inf
        self.held_tokens = 0

    def __contains__(self, session: int) -> bool:
        return session in self._held

    # ---- the door ----------------------------------------------------------------------

    def came(self, session: int, now: float) -> None:
        """A request of the session waits."""
        left_at = self._away.pop(session, None)
        if left_at is None:
            return
        self._waiting.add(session)
        if session in self._held:  # until it has room, and no longer
            self._held[session].until = self._held[session].last
        if self._gaps.observe(now - left_at):
            self._gaps.fit(now - np.array([*self._away.values()]))

    def is_admitted(self, session: int, num_tokens: int, waited_s: float, now: float) -> bool:
        """Whether a request of so many tokens may start. Asked again each step. Cost: O(1), and
        after a change a look at each session in play."""
        is_out = session in self._waiting and session not in self._present
        if not is_out or waited_s >= self._defer_s or not self._is_guarded(now):
            return True
        return self._fits(num_tokens)

    def _is_guarded(self, now: float) -> bool:
        """Whether sessions wait at the door: holds pay, tiers do not make up for their loss, and
        one was let go lately."""
        is_short = now - self.let_go_at < SHORT_S
        return is_short and self._pays and self.return_cost.ratio >= DOOR_RATIO

    def _fits(self, num_tokens: int) -> bool:
        """Whether one more session can be in play. Each may grow to what is usual."""
        usual = self._usual_tokens
        if self._in_play is None:
            self._in_play = sum(max(tokens, usual) for tokens in self._present.values())
        return not self._in_play or self._in_play + max(num_tokens, usual) <= self._most

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
        if self._away.pop(session, None) is not None:
            self._gaps.gave_up()

    # ---- holding -----------------------------------------------------------------------

    def ended(
        self,
        session: int,
        num_tokens: int,
        computing_s: float,
        now: float,
        most_s: float = math.inf,
    ) -> bool:
        """A request has ended. Returns whether its blocks are held.

        Args:
            computing_s: for all of its tokens.
            most_s: how long they may be held.
        """
        is_first = session in self._first
        self._first.discard(session)
        self._leave(session)
        part = 1 / USUAL_TURNS if self._usual_tokens else 1.0
        self._usual_tokens += part * (num_tokens - self._usual_tokens)
        self._away[session] = now
        if len(self._away) > SESSIONS_MAX:
            self._away.popitem(last=False)
            self._gaps.gave_up()
        saves_s = computing_s * self.return_cost.ratio
        seconds = self.seconds(num_tokens, saves_s)
        self._pays = seconds > 0
        if not seconds or self.held_tokens + num_tokens > self._most:
            return False
        if is_first and self._is_guarded(now) and not self._fits(num_tokens):
            return False
        last = now + min(self._longest_s, most_s)
        self._held[session] = _Held(num_tokens, now, min(now + seconds, last), last, saves_s)
        self.held_tokens += num_tokens
        self._join(session, num_tokens)
        return True

    def seconds(self, num_tokens: int, saves_s: float) -> float:
        """How long so many tokens are worth to be held; 0: they are not."""
        if not self._gaps.is_known:
            return 0.0
        back, away_s = self._gaps.returned()
        gain = back * saves_s - away_s * num_tokens / self._room
        gain[self._longest_s < ENDS_S] = -np.inf
        best = int(gain.argmax())
        return float(ENDS_S[best]) if gain[best] > 0 else 0.0

    def over(self, now: float) -> list[int]:
        """Sessions whose time is over: they are held no more."""
        over = [session for session, held in self._held.items() if held.until <= now]
        for session in over:
            self._leave(session)
        return over

    def let_go(self, now: float, number: int = 1, wanted_by: int | None = None) -> list[int]:
        """So many sessions that are held no more, since a request has no room: those that gain
        least a second. Those that are back come last, and that of the request after them. Cost: a
        look at each that is held."""

        def worth(one: int) -> tuple[bool, bool, float]:
            held = self._held[one]
            saves_s = self._gaps.rate(now - held.since) * held.saves_s / held.num_tokens
            return one == wanted_by, one in self._waiting, saves_s

        if self._held:
            self.let_go_at = now
        sessions = sorted(self._held, key=worth)[:number]
        for session in sessions:
            self._leave(session)
        return sessions

    def _join(self, session: int, num_tokens: int) -> None:
        self._present[session] = num_tokens
        self._in_play = None

    def _leave(self, session: int) -> None:
        """The session is not in play."""
        held = self._held.pop(session, None)
        if held is not None:
            self.held_tokens -= held.num_tokens
        if self._present.pop(session, None) is not None:
            self._in_play = None
