# SPDX-License-Identifier: Apache-2.0
"""When conversations return, by what their clients tell of them: tool, kind of agent, and with
which tokens an answer ends. Pure: time is given.

What is told with one request is its *context*: (tenant, agent, tool, ending). Models end a call of
a tool by tokens of its own, and each tool takes its time; so a context says when the next turn
comes. Contexts that are seen often have one of PLACES places, and at each place stands what was
seen of runs in that context alone, by *part*: the factors of a kind that matter beside it.

Nothing replaces the estimate that knows no context (returns.py): that one goes on learning from
all runs, and is what a context's own is drawn to. So with few runs seen it says the same.

Names come from clients. They are looked up within a tenant, who has TENANT_PLACES places at most: a
client can spoil the estimates of its own tenant alone. Tenants who make up names can push others'
names out, which are then estimated as if nothing were told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attnstore_vllm.policy.ages import NUM_AGES, Array, gittins, hazard, logistic

PLACES = 32
TENANT_PLACES = PLACES // 2
LATER, GAPS, ANSWERS = 2, 5, 4
PARTS = LATER * GAPS * ANSWERS
"""Parts of a place: whether it is a later turn, class of the gap, and length of the answer."""
ROWS = PLACES * PARTS
"""So many kinds more there are, each of which may have a lane in the order of departure."""
CANDIDATES_MAX = 512
"""Contexts without a place that are counted. The one not seen for longest is forgotten."""
SEEN_MIN = 8
"""A context that was seen so often may have a place ..."""
AGING = 4096
"""... and after so many were seen, all counts are halved."""
RIDGE = 1.0
ROUNDS = 3
CONTEXT_RUNS = 16.0
"""Runs' worth of evidence that the estimate without contexts has in each."""


class Told(NamedTuple):
    """What a client tells of a request."""

    tenant: bytes
    agent: str | None = None
    tool: str | None = None


_Name = tuple[Told, Hashable]


class Contexts:
    """Which contexts have a place. State: CANDIDATES_MAX names."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[_Name, int] = OrderedDict()
        self._places: dict[_Name, int] = {}
        self._names: list[_Name | None] = [None] * PLACES
        self._uses = [0] * PLACES
        self.open_runs = [0] * PLACES
        """Runs that are followed, by the place of their context."""
        self.serials = [0] * PLACES
        """How often a place was given away."""
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._places)

    def place(self, told: Told, ending: Hashable = None) -> int:
        """The place of this context, which was seen once more; -1: it has none. Cost: O(PLACES) at
        most."""
        self._age()
        name = (told, ending)
        place = self._places.get(name)
        if place is not None:
            self._uses[place] += 1
            return place
        seen = self._candidates.pop(name, 0) + 1
        place = self._free_place(told.tenant, seen) if seen >= SEEN_MIN else None
        if place is None:
            self._candidates[name] = seen
            if len(self._candidates) > CANDIDATES_MAX:
                self._candidates.popitem(last=False)
            return -1
        self._places[name] = place
        self._names[place] = name
        self._uses[place] = seen
        self.serials[place] += 1
        return place

    def _age(self) -> None:
        self._num_seen += 1
        if self._num_seen % AGING == 0:
            self._uses = [uses // 2 for uses in self._uses]
            for name in self._candidates:
                self._candidates[name] //= 2

    def _free_place(self, tenant: bytes, seen: int) -> int | None:
        """A place that no run is in any more, given up if need be by the context seen least: so no
        run is ever judged by what was learned of another context."""
        named = [p for p, of in enumerate(self._names) if of is not None]
        own = [p for p in named if self._tenant_at(p) == tenant]
        has_most = len(own) >= TENANT_PLACES
        if not has_most and len(named) < PLACES:
            empty = [p for p, of in enumerate(self._names) if of is None and not self.open_runs[p]]
            return empty[0] if empty else None  # one comes free as its runs return
        least = min(own if has_most else named, key=self._uses.__getitem__)
        if self._uses[least] >= seen:
            return None
        self._give_up(least)
        return least if not self.open_runs[least] else None

    def _tenant_at(self, place: int) -> bytes:
        of = self._names[place]
        return of[0].tenant if of is not None else b""

    def _give_up(self, place: int) -> None:
        of = self._names[place]
        assert of is not None
        del self._places[of]
        self._names[place] = None


@dataclass(frozen=True, slots=True, eq=False)
class ToldSeen:
    """A copy of what was seen at all places."""

    returned: Array
    departed: Array
    """[ROWS, age] weights, as in returns.Observed."""
    serials: tuple[int, ...]


class ToldReturns:
    """What was seen at each place. State: 1 MB."""

    def __init__(self) -> None:
        self.contexts = Contexts()
        self._returned = np.zeros((ROWS, NUM_AGES))
        self._departed = np.zeros((ROWS, NUM_AGES))
        self._counted = [0] * PLACES  # the serials that the tables are of
        self._learned = [0] * PLACES  # and the fit

    def open(self, place: int) -> None:
        """A run in this context is followed."""
        if self._counted[place] != self.contexts.serials[place]:
            self._counted[place] = self.contexts.serials[place]
            rows = slice(place * PARTS, (place + 1) * PARTS)
            self._returned[rows] = self._departed[rows] = 0.0
        self.contexts.open_runs[place] += 1

    def leave(self, place: int) -> None:
        """It is not, or of another context."""
        self.contexts.open_runs[place] -= 1

    def close(self, place: int, part: int, age: int, weight: float, *, returned: bool) -> None:
        """A run that was open in this context has returned, or is followed no more."""
        table = self._returned if returned else self._departed
        table[place * PARTS + part, age] += weight
        self.leave(place)

    def row(self, place: int, part: int) -> int | None:
        """The row of such runs in Fit's table; None: nothing was learned there yet."""
        if place < 0 or part < 0 or self._learned[place] != self.contexts.serials[place]:
            return None
        return place * PARTS + part

    def seen(self) -> ToldSeen | None:
        """None: no context has ever had a place."""
        if not any(self.contexts.serials):
            return None
        return ToldSeen(self._returned.copy(), self._departed.copy(), tuple(self._counted))

    def halve(self) -> None:
        self._returned *= 0.5
        self._departed *= 0.5

    def learn(self, serials: tuple[int, ...]) -> None:
        """A fit of this is in place."""
        self._learned = [*serials]


def fit_told(returned: Array, waiting: Array, p: Array, q: Array) -> Array:
    """What runs of each place and part are worth. Pure. Cost: as the fit without contexts.

    A context shifts the odds to return of all its parts together; each of them, and each of its
    gaps, then goes its own way as far as there is evidence for it.

    Args:
        returned, waiting: [ROWS, age] runs that returned at that age; that have not up to it.
        p: [PARTS] the estimates without contexts: of a return at all,
        q: [PARTS, age] and in this age, if not before.
    Returns: [ROWS, age] returns a second.
    """
    shape = PLACES, PARTS, NUM_AGES
    returned, waiting = returned.reshape(shape), waiting.reshape(shape)
    returned_sum, total = returned.sum(axis=2), (returned + waiting).sum(axis=2)
    p = np.clip(p, 1e-6, 1 - 1e-6)
    odds = np.log(p / (1 - p))
    return_p, return_q = np.tile(p, (PLACES, 1)), np.tile(q, (PLACES, 1, 1))
    shift = np.zeros((PLACES, 1))
    gap_of = np.arange(PARTS) // ANSWERS % GAPS
    for _ in range(ROUNDS):
        after = np.cumprod(1 - return_q, axis=2)
        before = np.concatenate([np.ones((*after.shape[:2], 1)), after[..., :-1]], axis=2)
        left = return_p[..., None] * (after + before) / 2
        will_return = waiting * left / (1 - return_p[..., None] + left)
        positive = returned_sum + will_return.sum(axis=2)
        for _ in range(2):  # Newton's method
            mean = logistic(odds + shift)
            slope = (positive - total * mean).sum(axis=1, keepdims=True) - RIDGE * shift
            curvature = (total * mean * (1 - mean)).sum(axis=1, keepdims=True) + RIDGE
            shift = shift + np.clip(slope / curvature, -1, 1)
        shifted = logistic(odds + shift)
        return_p = (positive + CONTEXT_RUNS * shifted) / (total + CONTEXT_RUNS)
        seen = _by_gap(returned), _by_gap(will_return)
        prior = q[: GAPS * ANSWERS : ANSWERS]
        return_q = np.clip(hazard(*seen, prior, CONTEXT_RUNS), 1e-6, 0.999)[:, gap_of]
    return gittins(return_p.reshape(ROWS), return_q.reshape(ROWS, NUM_AGES))


def _by_gap(counts: Array) -> Array:
    """[place, gap, age] of [place, part, age]."""
    parts = counts.reshape(PLACES, LATER, GAPS, ANSWERS, NUM_AGES)
    return np.asarray(parts.sum(axis=(1, 3)))
