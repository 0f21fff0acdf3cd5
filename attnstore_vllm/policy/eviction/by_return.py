# SPDX-License-Identifier: Apache-2.0
"""The order that servers use: the key that is least likely to return soon goes first. Pure.

All slots of a key return together or not at all, so they are worth the same. Keys of one *lane*
stand in the order of their age, and what they are worth rises with age up to some point and falls
from there: the one that is worth least stands at one end or the other. So a decision looks at the
ends of lanes alone, however many keys there are.

Clients choose how many lanes there are: up to NUM_KINDS and told.ROWS for each priority. A context
that is given up leaves its rows to others, and what stood in such a lane stays there: each end is
judged by what its own key is of, a context that has gone by its kind. So what
each end is worth stands in an array, and the least of it is found in one pass that takes
microseconds. It is worked out again, for all of them at once, when the end is of another key, when
its age comes into another class, and when the estimator has learned.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.ages import EDGES_S, age_of, ages_of
from attnstore_vllm.policy.eviction.base import K
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import Fit, ReturnEstimator
from attnstore_vllm.policy.told import NOTHING, ROWS
from attnstore_vllm.policy.visits import Run

T = TypeVar("T", bound=np.generic)

ENDS_MAX = 32
"""Ends of lanes that a decision looks at, if no slots there can go ..."""
KEYS_MAX = 4
"""... and so many keys at each."""
VICTIMS_MAX = 16
"""So many slots of a key are given up before all are looked at again."""
EARLY_S = 1e-6
"""An age is looked at so long before it changes: sums of times are not exact."""
NEXT_AGE_S = np.append(EDGES_S[1:-1], math.inf) - EARLY_S
"""[age] where the next one begins."""
LANES_MIN = 16
STAYS = 1 << 62
"""Bit of a turn: lanes that are worth the same go in the order in which they were opened, but those
that stay go after the others."""
_NEXT_AGE_S: list[float] = NEXT_AGE_S.tolist()
FEW = 8
"""Up to so many ends are looked at one by one, which is sooner than all at once."""
PRIORITY_FACTORS = {
    Priority.ENDED: 1e-30,
    Priority.LOW_VALUE: 1 / 4096,
    Priority.LOW: 1 / 16,
    Priority.NORMAL: 1.0,
    Priority.HIGH: 16.0,
}
"""Factors of a run's worth, by priority. A factor and not an order: worth falls with age, so what
no request comes back to leaves in the end, even if it was said to stay. What has ended is worth
less than anything else, at any age."""


class AgeLane(NamedTuple):
    """Keys that differ in their age alone."""

    kind: int
    """A row of the table of what kinds are worth (Fit.row)."""
    factor: float
    """By which that worth is multiplied."""
    stays: bool
    """Whether its keys go after others that are worth the same."""
    told: int = NOTHING
    """The name of the row of a context, which says more than the kind as long as it is known."""

    @property
    def home(self) -> AgeLane:
        """The lane that its keys stand in: a row has one, of any context."""
        if self.told == NOTHING:
            return self
        return AgeLane(NOTHING, self.factor, self.stays, self.told % ROWS)


class ByReturn(Generic[K]):
    """See the module. Of those that are worth the same, the lane that was there first gives one up,
    and its oldest before its newest.

    Args:
        lane: that a key is of, and is judged by. May change: rank(). One whose context goes does so
            by itself.
        since: when a key's age began.
        fitted: by which keys are worth something now: another one, once it is another worth.
    """

    moves_on_use = True

    def __init__(
        self,
        lane: Callable[[K], AgeLane],
        since: Callable[[K], float],
        fitted: Callable[[], Fit],
    ) -> None:
        self._lane = lane
        self._since_of = since
        self._fitted = fitted
        self.clear()

    def clear(self) -> None:
        self.places: dict[AgeLane, int] = {}
        self._place_of: dict[K, int] = {}
        self._lanes: list[AgeLane] = []  # by place, as all that follows
        self._keys: list[OrderedDict[K, None]] = []  # each oldest first
        self._free: list[int] = []
        self._opened = 0
        self._turn = np.zeros(0, np.int64)  # among those worth the same; 0: the place is free
        self._factor = np.zeros(0)
        # By end: that of the oldest key of the lane at place p is 2 * p, of the newest 2 * p + 1.
        self._kind, self._told = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._since = np.zeros(0)
        self._worth = np.zeros(0)  # inf: there is none, or it is passed over
        self._due = np.zeros(0)  # when to look at it again
        self._passed: list[int] = []
        self._fit = self._fitted()
        self._looked_at = -math.inf
        self._poorest: K | None = None
        self._victims_left = 0

    def add(self, key: K) -> None:
        home = self._lane(key).home
        place = self.places.get(home)
        if place is None:
            place = self._open(home)
        self._place_of[key] = place
        keys = self._keys[place]
        keys[key] = None
        if len(keys) == 1:
            self._set_end(2 * place, key)
        self._set_end(2 * place + 1, key)
        self._poorest = None

    def add_oldest(self, keys: Iterable[K]) -> None:
        """Their age says it."""
        for key in keys:
            self.add(key)

    def use(self, key: K) -> None:
        """A key's age counts from its beginning."""

    def rank(self, key: K) -> None:
        """It may be of another lane, and stands behind those that were there before it: the order
        by age is one by ends of requests then, which a look at both ends can do with."""
        place = self._place_of[key]
        if self._lane(key).home != self._lanes[place]:
            self.remove(key)
            self.add(key)
            return
        keys = self._keys[place]
        if next(iter(keys)) == key:  # its row may be of another context
            self._set_end(2 * place, key)
        if next(reversed(keys)) == key:
            self._set_end(2 * place + 1, key)

    def remove(self, key: K) -> None:
        place = self._place_of.pop(key)
        keys = self._keys[place]
        is_oldest, is_newest = next(iter(keys)) == key, next(reversed(keys)) == key
        del keys[key]
        if not keys:
            self._close(place)
        elif is_oldest:
            self._set_end(2 * place, next(iter(keys)))
        elif is_newest:
            self._set_end(2 * place + 1, next(reversed(keys)))
        if key is self._poorest:
            self._poorest = None

    def victim(self, now: float, can_go: Callable[[K], bool]) -> K | None:
        """See Order. An end whose first key cannot go is passed over, and the next keys there are
        taken for what they are worth: they may be worth less than what was found before it.

        Where ENDS_MAX ends are held, the next decision looks at others.
        Cost: one pass over the lanes for the first slot of a key, O(1) for those after it.
        """
        if self._poorest is not None and self._victims_left:
            self._victims_left -= 1
            if can_go(self._poorest):
                return self._poorest
        self._victims_left = VICTIMS_MAX
        self._look(now)
        found, least = None, (math.inf, 0)
        for _ in range(ENDS_MAX):
            end = self._least()
            if end is None or (found is not None and self._rank(end) >= least):
                self._pass_none_over()
                break
            depth, key = self._first_that_can(end, can_go)
            if depth == 0:  # as is so nearly always
                found = key
                break
            if key is not None:
                rank = self.worth(key, now), self._rank(end)[1]
                if rank < least:
                    found, least = key, rank
            self._passed.append(end)
            self._worth[end] = math.inf
        if found is not None:
            self._pass_none_over()
            self._poorest = found
        return found

    def last(self, now: float) -> K | None:
        """See Order. Of each lane the newest. Cost: one pass over the lanes."""
        self._pass_none_over()
        self._look(now)
        if not self.places:
            return None
        worth = np.where(self._turn, self._worth[1::2], -1.0)
        most = np.flatnonzero(worth == worth.max())
        place = most.item(_argmin(self._turn[most] ^ STAYS))
        return next(reversed(self._keys[place]))

    def worth(self, key: K, now: float) -> float:
        lane = self._lane(key)
        fit, age = self._fitted(), age_of(now - self._since_of(key))
        return lane.factor * fit.worths.item(fit.row(lane.kind, lane.told), age)

    def admits(self, key: K, over: K, now: float) -> bool:
        """Not if it is less likely to return soon than what would have to go.

        So prompts that come once do not push out conversations.
        """
        return self.worth(key, now) >= self.worth(over, now)

    # ---- lanes ---------------------------------------------------------------------------

    def _open(self, lane: AgeLane) -> int:
        if not self._free:
            self._grow()
        place = self.places[lane] = self._free.pop()
        self._opened += 1
        self._lanes[place] = lane
        self._factor[place] = lane.factor
        self._turn[place] = self._opened | (STAYS if lane.stays else 0)
        return place

    def _close(self, place: int) -> None:
        del self.places[self._lanes[place]]
        self._turn[place] = 0
        ends = slice(2 * place, 2 * place + 2)
        self._worth[ends] = self._due[ends] = math.inf
        self._free.append(place)

    def _grow(self) -> None:
        """Make room for as many lanes again. Cost: all lanes."""
        before, size = len(self._lanes), max(2 * len(self._lanes), LANES_MIN)
        self._free += range(size - 1, before - 1, -1)
        self._lanes += [AgeLane(0, 0.0, False)] * (size - before)
        self._keys += [OrderedDict[K, None]() for _ in range(size - before)]
        self._turn = _longer(self._turn, size, 0)
        self._factor = _longer(self._factor, size, 0.0)
        self._kind = _longer(self._kind, 2 * size, 0)
        self._told = _longer(self._told, 2 * size, NOTHING)
        self._since = _longer(self._since, 2 * size, 0.0)
        self._worth = _longer(self._worth, 2 * size, math.inf)
        self._due = _longer(self._due, 2 * size, math.inf)

    # ---- ends ----------------------------------------------------------------------------

    def _set_end(self, end: int, key: K) -> None:
        """This key stands there now."""
        self._kind[end], _, _, self._told[end] = self._lane(key)
        self._since[end] = self._since_of(key)
        self._due[end] = -math.inf

    def _look(self, now: float) -> None:
        """Work out again what ends are worth whose age has come into another class."""
        fit = self._fitted()
        if fit is not self._fit or now < self._looked_at:  # or a clock that went back
            self._due[np.repeat(self._turn > 0, 2)] = -math.inf
        self._fit, self._looked_at, table = fit, now, fit.worths
        ends = (self._due <= now).nonzero()[0]
        if len(ends) <= FEW:
            lanes, worth, due = self._lanes, self._worth, self._due
            kind, told = self._kind, self._told
            for end, since in zip(ends.tolist(), self._since[ends].tolist(), strict=True):
                row, age = fit.row(kind.item(end), told.item(end)), age_of(now - since)
                worth[end] = lanes[end >> 1].factor * table.item(row, age)
                due[end] = since + _NEXT_AGE_S[age]
            return
        began, places = self._since[ends], ends >> 1
        ages = ages_of(now - began)
        rows = fit.rows(self._kind[ends], self._told[ends])
        self._worth[ends] = self._factor[places] * table[rows, ages]
        self._due[ends] = began + NEXT_AGE_S[ages]

    def _least(self) -> int | None:
        """The end that is worth least; None if there is none left."""
        if not self.places:
            return None
        least = np.minimum.reduce(self._worth)
        if least == math.inf:
            return None
        same = (self._worth == least).nonzero()[0]
        return same.item(_argmin(self._turn[same >> 1]) if len(same) > 1 else 0)

    def _rank(self, end: int) -> tuple[float, int]:
        return self._worth.item(end), self._turn.item(end >> 1)

    def _first_that_can(self, end: int, can_go: Callable[[K], bool]) -> tuple[int, K | None]:
        """The key that goes first there, and how many are before it."""
        keys = self._keys[end >> 1]
        first = next(reversed(keys) if end & 1 else iter(keys))
        if can_go(first):
            return 0, first
        others = islice(reversed(keys) if end & 1 else keys, 1, KEYS_MAX)
        for depth, key in enumerate(others, 1):
            if can_go(key):
                return depth, key
        return KEYS_MAX, None

    def _pass_none_over(self) -> None:
        """Look again at what could not go: it may have been let go."""
        if self._passed:
            held = np.array(self._passed)
            self._due[held[self._turn[held >> 1] > 0]] = -math.inf
            self._passed.clear()


def _argmin(values: npt.NDArray[T]) -> int:
    """Where the least stands. numpy's argmin() lets go of the interpreter's lock, however few there
    are: another thread would have its turn in the midst of a decision, under the store's lock."""
    return (values == np.minimum.reduce(values)).nonzero()[0].item(0)


def _longer(array: npt.NDArray[T], size: int, fill: float) -> npt.NDArray[T]:
    longer = np.full(size, fill, array.dtype)
    longer[: len(array)] = array
    return longer


def by_return(estimator: ReturnEstimator) -> ByReturn[Run]:
    """The order that servers use. Runs of one kind, context and priority have a lane of
    their own. In a request, what others share is before what is its own, and stays. It is of no
    context: who else uses it has told nothing."""

    def lane(run: Run) -> AgeLane:
        told = NOTHING if run.is_shared else estimator.told.name(run.context, run.kind)
        return AgeLane(run.kind, PRIORITY_FACTORS[run.priority], run.is_shared, told)

    return ByReturn(
        lane,
        lambda run: run.since,
        lambda: estimator.fitted,
    )
