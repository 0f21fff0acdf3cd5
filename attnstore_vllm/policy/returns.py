# SPDX-License-Identifier: Apache-2.0
"""Which runs of chunks come back, and when: learned online from what the store sees. Pure: time is
given.

A *run* is a stretch of chunks up to some chunk, its *end*. It *returns* when a later request goes
through that end. Most runs never do, and it is not said which; so two things are learned together
(a mixture cure model):

    p(kind)        how likely a run of this kind returns at all;
    q(class, age)  of those that do, how likely in this stretch of ages, if not before.

A run that is still open counts as one that will return with the probability that it has left, so
what has not ended yet is neither ignored nor taken for lost. Both are fitted by expectation and
maximisation: p as a logistic regression over the factors of a kind (turn, gap, answer, ...), so
that a kind that was seldom seen borrows from those that it shares factors with; q as a discrete
hazard that each class of gaps borrows from all together.

What a slot is worth then is the Gittins index: the best ratio, over all times to keep the run for,
of the probability that it returns to the time that it stays. Before anything was seen p is the
same for all and the worth falls with age, so the order is that of LRU.

Runs are followed whether or not their chunks are still stored: what is learned is not of survivors
    only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.ages import (
    NUM_AGES,
    Array,
    age_of,
    ages_of,
    gittins,
    hazard,
    logistic,
)
from attnstore_vllm.policy.told import NOTHING, ROWS, Ints, ToldReturns, ToldSeen

RUNS_MAX = 65536
"""Open runs that are followed. The oldest is given up for a new one."""
REFIT_RUNS = 256
FIRST_REFITS = (32, 64, 128)
DECAY_RUNS = 1 << 17
"""After so many runs what was seen before counts half."""

TURNS_MAX = 4
GAPS_S = (15.0, 60.0, 240.0)
LENGTHS_TOKENS = (2048, 8192, 32768)
ANSWERS_TOKENS = (64, 256, 1024)
SHAPE = (TURNS_MAX, len(GAPS_S) + 2, len(LENGTHS_TOKENS) + 1, 2, 2, len(ANSWERS_TOKENS) + 1)
"""Axes of the kinds: turn, gap to the turn before, tokens of the prompt, mostly new?, shared?,
tokens of the answer as far as known: none before the request has ended, and of what is shared."""
NUM_KINDS = math.prod(SHAPE)

PRIOR_HAZARD = np.array([0.65] + [0.25] * (NUM_AGES - 1))
"""Hazard of each age before anything was seen: as ages double, a rate that falls as 1/t. The first
age is a wider one, and its rate the highest."""
PRIOR_RUNS = 4.0
"""Runs' worth of evidence that the prior has among all classes together ..."""
CLASS_RUNS = 16.0
"""... that all classes together have in each class ..."""
KIND_RUNS = 16.0
"""... and that the regression has in each kind."""
RIDGE = 5.0
STEP_MAX = 1.0
"""The longest step of Newton's method, for each coefficient: with few runs a full one may go far
astray."""
ROUNDS = 3


def kind_of(
    turn: int, gap_s: float | None, num_tokens: int, *, is_fresh: bool, is_shared: bool
) -> int:
    """The kind of a run before its request is answered.

    Args:
        turn: 1 for the first request of a conversation.
        gap_s: since the request before went through its beginning; None if none did.
        num_tokens: of the prompt.
        is_fresh: most of the prompt was not known before.
        is_shared: other conversations go through it too.
    """
    gap = 0 if gap_s is None else 1 + sum(gap_s >= limit for limit in GAPS_S)
    length = sum(num_tokens >= limit for limit in LENGTHS_TOKENS)
    kind = (min(turn, TURNS_MAX) - 1) * SHAPE[1] + gap
    return (((kind * SHAPE[2] + length) * 2 + is_fresh) * 2 + is_shared) * SHAPE[5]


def answered(kind: int, num_tokens: int) -> int:
    """The kind of a run whose request was answered with so many tokens."""
    return kind - kind % SHAPE[5] + sum(num_tokens >= limit for limit in ANSWERS_TOKENS)


_FACTORS = np.indices(SHAPE).reshape(len(SHAPE), NUM_KINDS)
_DESIGN = np.concatenate(
    [np.ones((1, NUM_KINDS))]
    + [_FACTORS[f] == np.arange(size)[:, None] for f, size in enumerate(SHAPE)]
).T.astype(np.float64)
"""[kind, 1 + values of all factors]: which it has."""
_CLASSES = _FACTORS[1] * 2 + _FACTORS[4]
_NUM_CLASSES = SHAPE[1] * 2


@dataclass(frozen=True, slots=True)
class Before:
    """The open run that a request continues."""

    number: int
    depth: int
    """Chunks of the request up to the run's end."""
    turn: int
    """0 if it was a shared one."""
    since: float
    num_tokens: int
    """The length of its request's prompt; 0 if that was not said."""


class ReturnEstimator:
    """See the module. State: RUNS_MAX open runs, some 10 MB, and a table of kinds and ages.

    Deterministic: the same calls give the same worth.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # end -> place of the open run
        self._end = [0] * RUNS_MAX
        self._number = np.zeros(RUNS_MAX, np.int64)
        self._kind = np.zeros(RUNS_MAX, np.int32)
        self._turn = np.zeros(RUNS_MAX, np.int16)
        self._num_tokens = np.zeros(RUNS_MAX, np.int32)
        self._since = np.zeros(RUNS_MAX)
        self._weight = np.zeros(RUNS_MAX)
        self._row = np.full(RUNS_MAX, NOTHING)
        self.told = ToldReturns()
        self._is_open = np.zeros(RUNS_MAX, np.bool_)
        self.is_due = False
        """Whether refit() is to be called soon."""
        self._opened = 0
        self._unfollowed = 0
        self._decay_at = DECAY_RUNS
        self._weight_sum = 0.0
        # [kind, age], in weights: runs that returned at that age; that were followed up to it.
        self._returned = np.zeros((NUM_KINDS, NUM_AGES))
        self._departed = np.zeros((NUM_KINDS, NUM_AGES))
        self._fit = _prior()

    def __len__(self) -> int:
        return len(self._places)

    def arrive(self, marks: Sequence[int], now: float) -> Before | None:
        """A request came whose whole chunks have these marks. Ends the runs that it goes through.

        Args:
            marks: 64 bits of each chunk's key, or anything that names it.
        Returns: the deepest of them. Cost: a look-up a chunk.
        """
        deepest: Before | None = None
        for depth in range(len(marks), 0, -1):
            place = self._places.pop(marks[depth - 1], None)
            if place is None:
                continue
            if deepest is None:
                deepest = Before(
                    int(self._number[place]),
                    depth,
                    int(self._turn[place]),
                    float(self._since[place]),
                    int(self._num_tokens[place]),
                )
            self._close(place, self._returned, now)
        return deepest

    def open(
        self,
        end: int,
        kind: int,
        turn: int,
        weight: float,
        now: float,
        num_tokens: int = 0,
    ) -> int:
        """Follow a run from now on.

        Args:
            end: the mark of its last chunk.
            turn: of its conversation; TURNS_MAX at most. 0 for a shared run.
            weight: its chunks; slots are what is worth something, not requests.
            num_tokens: of its request's prompt.
        Returns: its number. Cost: O(1).
        """
        if end in self._places:
            self._close(self._places.pop(end), self._returned, now)
        place = self._opened % RUNS_MAX
        if self._is_open[place]:
            del self._places[self._end[place]]
            self._close(place, self._departed, now)
        self._opened += 1
        self._weight_sum += weight
        self._end[place] = end
        self._number[place] = self._opened
        self._kind[place], self._turn[place] = kind, turn
        self._num_tokens[place] = num_tokens
        self._since[place], self._weight[place] = now, weight
        self._is_open[place] = True
        self._row[place] = NOTHING
        self._places[end] = place
        self.is_due |= self._opened % REFIT_RUNS == 0 or self._opened in FIRST_REFITS
        return self._opened

    def unfollowed(self) -> int:
        """The number of a run that has no whole chunk yet, whose end could be followed."""
        self._unfollowed -= 1
        return self._unfollowed

    def change(self, number: int, kind: int, context: int = NOTHING) -> None:
        """An open run is of this kind, and of this context by its number (told.py). Nothing changes
        for one that is not open. Cost: O(1)."""
        place = (number - 1) % RUNS_MAX
        if self._is_open[place] and self._number[place] == number:
            self._kind[place] = kind
            self._row[place] = self.told.follow(context, kind)

    def worth(self, kind: int, seconds: float) -> float:
        """Expected returns per second of a slot whose run has not returned for that long."""
        return float(self._fit.worths.item(kind, age_of(seconds)))

    @property
    def fitted(self) -> Fit:
        """All that was learned. Never changed: another one, once more was learned."""
        return self._fit

    def returns(self, kind: int) -> float:
        """The probability that a run of this kind returns at all."""
        return float(self._fit.p[kind])

    def _close(self, place: int, table: Array, now: float) -> None:
        self._is_open[place] = False
        age = age_of(now - self._since[place])
        weight = float(self._weight[place])
        table[self._kind[place], age] += weight
        self.told.close(int(self._row[place]), age, weight, returned=table is self._returned)

    def refit(self, now: float) -> None:
        """Learn from what was seen since the last time. Cost: some milliseconds."""
        self.learn(self.seen(now).fit())

    def seen(self, now: float) -> Observed:
        """A copy of what fit() learns from, which may be called beside further events."""
        self.is_due = False
        seen = Observed(
            now,
            self._is_open.copy(),
            self._kind.copy(),
            self._since.copy(),
            self._weight.copy(),
            self._returned.copy(),
            self._departed.copy(),
            self._weight_sum / max(1, self._opened),
            self._fit,
            self._row.copy(),
            self.told.seen(),
        )
        if self._opened >= self._decay_at:
            self._decay_at += DECAY_RUNS
            self._returned *= 0.5
            self._departed *= 0.5
            self.told.halve()
        return seen

    def learn(self, fit: Fit) -> None:
        self._fit = fit


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fit: all that was learned."""

    p: Array
    """[kind] the probability to return at all."""
    q: Array
    """[class, age] of those that do, to return at this age, if not before."""
    coefficients: Array
    """Coefficients of the regression."""
    worths: Array
    """[row, age] returns a second. Of all kinds: an eviction has no time to work one out. Behind
    them those of contexts, if there were any."""
    names: Ints | None = None
    """[ROWS] those of the contexts' rows (told.py). None: there were none."""

    def row(self, kind: int, name: int) -> int:
        """That in `worths`: of a context, if its row of this name was learned; else of the kind."""
        if name == NOTHING or self.names is None or self.names.item(name % ROWS) != name:
            return kind
        return NUM_KINDS + name % ROWS

    def rows(self, kinds: Ints, names: Ints) -> Ints:
        """row() of each."""
        if self.names is None:
            return kinds
        is_learned = (names != NOTHING) & (self.names[names % ROWS] == names)
        return np.where(is_learned, NUM_KINDS + names % ROWS, kinds)


@cache
def _prior() -> Fit:
    """The fit before anything was seen."""
    p, q = np.full(NUM_KINDS, 0.5), np.tile(PRIOR_HAZARD, (_NUM_CLASSES, 1))
    return Fit(p, q, np.zeros(_DESIGN.shape[1]), gittins(p, q, _CLASSES))


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The estimator's state at a time, and what was learned before."""

    now: float
    is_open: npt.NDArray[np.bool_]
    kind: npt.NDArray[np.int32]
    since: Array
    weight: Array
    """[place] of the open runs."""
    returned: Array
    """[kind, age] weights that returned at that age."""
    departed: Array
    """[kind, age] that were followed up to it and no further."""
    run: float
    """The mean weight of a run: the unit."""
    before: Fit
    row: Ints
    """[place] of the open runs, the name of the context's row, or NOTHING."""
    told: ToldSeen | None

    def fit(self) -> Fit:
        """Pure. Cost: some milliseconds."""
        live = np.flatnonzero(self.is_open)
        cells = self.kind[live] * NUM_AGES + ages_of(self.now - self.since[live])
        counts = np.bincount(cells, self.weight[live], NUM_KINDS * NUM_AGES)
        waiting = self.departed + counts.reshape(NUM_KINDS, NUM_AGES)
        b = self.before
        p, q, coefficients = _fit(
            self.returned / self.run, waiting / self.run, b.p, b.q, b.coefficients
        )
        worths = gittins(p, q, _CLASSES)
        if self.told is None:
            return Fit(p, q, coefficients, worths)
        ages, classes = ages_of(self.now - self.since[live]), _CLASSES[self.told.kinds]
        open_runs = self.row[live], ages, self.weight[live]
        told = self.told.worths(*open_runs, self.run, p[self.told.kinds], q, classes)
        return Fit(p, q, coefficients, np.concatenate([worths, told]), self.told.names)


def _fit(
    returned: Array, waiting: Array, p: Array, q: Array, coefficients: Array
) -> tuple[Array, Array, Array]:
    """Expectation and maximisation, from the last fit on.

    Args:
        returned, waiting: [kind, age] runs that returned at that age; that have not up to it.
    """
    returned_sum, total = returned.sum(axis=1), (returned + waiting).sum(axis=1)
    seen = np.flatnonzero(total)  # the others would add nothing to any sum below
    returned, waiting, returned_sum = returned[seen], waiting[seen], returned_sum[seen]
    design, classes, total = _DESIGN[seen], _CLASSES[seen], total[seen]
    for _ in range(ROUNDS):
        after = np.cumprod(1 - q, axis=1)
        before = np.concatenate([np.ones((_NUM_CLASSES, 1)), after[:, :-1]], axis=1)
        left = p[seen, None] * ((after + before) / 2)[classes]
        will_return = waiting * left / (1 - p[seen, None] + left)
        positive = returned_sum + will_return.sum(axis=1)
        coefficients = _regress(design, positive, total, coefficients)
        p = logistic(_DESIGN @ coefficients)
        p[seen] = (positive + KIND_RUNS * p[seen]) / (total + KIND_RUNS)
        by_class = np.zeros((2, _NUM_CLASSES, NUM_AGES))
        np.add.at(by_class[0], classes, returned)
        np.add.at(by_class[1], classes, will_return)
        returned_in_all, waiting_in_all = by_class.sum(axis=1)
        pooled = hazard(returned_in_all, waiting_in_all, PRIOR_HAZARD, PRIOR_RUNS)
        q = np.clip(hazard(by_class[0], by_class[1], pooled, CLASS_RUNS), 1e-6, 0.999)
    return p, q, coefficients


def _regress(design: Array, positive: Array, total: Array, coefficients: Array) -> Array:
    """Two steps of Newton's method towards the ridge estimate; the next rounds do the rest."""
    ridge = RIDGE * np.eye(len(coefficients))
    for _ in range(2):
        mean = logistic(design @ coefficients)
        slope = design.T @ (positive - total * mean) - RIDGE * coefficients
        curvature = (design * (total * mean * (1 - mean))[:, None]).T @ design + ridge
        step = np.linalg.solve(curvature, slope)
        coefficients = coefficients + np.clip(step, -STEP_MAX, STEP_MAX)
    return coefficients
