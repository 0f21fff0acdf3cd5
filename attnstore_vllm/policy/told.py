# SPDX-License-Identifier: Apache-2.0
"""When conversations return, by what their clients tell of them: tool, kind of agent, and with
which tokens an answer ends. Pure: time is given.

What is told with one request is its *context*: (tenant, agent, tool, ending). Models end a call of
a tool by tokens of its own, and each tool takes its time; so a context says when the next turn
comes. Contexts that are seen often are known, PLACES at most. For each there are *rows*: what was
seen of its runs, by their kind (returns.py).

Nothing replaces the estimate that knows no context: that one goes on learning from all runs, and is
what a row's own is drawn to. So with few runs seen it says the same, and of what a kind says
nothing is lost.

Names come from clients. They are looked up within a tenant, who has TENANT_PLACES contexts at most:
a client can spoil the estimates of its own tenant alone. Tenants who make up names can push others'
names out, which are then estimated as if nothing were told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.policy.ages import NUM_AGES, Array, gittins, hazard, logistic

Ints = npt.NDArray[np.int64]

PLACES = 32
TENANT_PLACES = PLACES // 2
CONTEXT_ROWS = 64
ROWS = PLACES * CONTEXT_ROWS
"""So many kinds more there are. Each may have a lane in the order of departure. Runs that find no
row are estimated by their kind."""
CANDIDATES_MAX = 512
"""Contexts that are counted and not known. The one not seen for longest is forgotten."""
SEEN_MIN = 8
"""A context that was seen so often may be known ..."""
AGING = 4096
"""... and after so many were seen, all counts are halved."""
RIDGE = 1.0
ROUNDS = 3
CONTEXT_RUNS = 16.0
"""Runs' worth of evidence that the estimate without contexts has in each."""
NOTHING = -1


class Told(NamedTuple):
    """A client's words of a request that say when it comes back."""

    tenant: bytes
    agent: str | None = None
    tool: str | None = None


_Name = tuple[Told, Hashable]


class Contexts:
    """Which contexts are known, by numbers that are used once. State: CANDIDATES_MAX names."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[_Name, int] = OrderedDict()
        self._numbers: dict[_Name, int] = {}
        self._uses: dict[int, int] = {}
        self._tenants: Counter[bytes] = Counter()
        self._num_seen = self._num_named = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, told: Told, ending: Hashable = None) -> tuple[int, int]:
        """The number of this context, which was seen once more, or NOTHING; and that of the context
        which is not known any more, to make room for it, or NOTHING. Cost: O(PLACES) at most."""
        self._age()
        name = (told, ending)
        number = self._numbers.get(name)
        if number is not None:
            self._uses[number] += 1
            return number, NOTHING
        seen = self._candidates.pop(name, 0) + 1
        given_up = self._room(told.tenant, seen) if seen >= SEEN_MIN else None
        if given_up is None:
            self._candidates[name] = seen
            if len(self._candidates) > CANDIDATES_MAX:
                self._candidates.popitem(last=False)
            return NOTHING, NOTHING
        number = self._numbers[name] = self._num_named
        self._num_named += 1
        self._uses[number] = seen
        self._tenants[told.tenant] += 1
        return number, given_up

    def _age(self) -> None:
        self._num_seen += 1
        if self._num_seen % AGING == 0:
            self._uses = {number: uses // 2 for number, uses in self._uses.items()}
            for name in self._candidates:
                self._candidates[name] //= 2

    def _room(self, tenant: bytes, seen: int) -> int | None:
        """Room for one more: NOTHING where there is some, else the number of the context seen
        least, which is given up. None: all were seen as often."""
        has_most = self._tenants[tenant] >= TENANT_PLACES
        if not has_most and len(self._numbers) < PLACES:
            return NOTHING
        names = (name for name in self._numbers if name[0].tenant == tenant or not has_most)
        least = min(names, key=lambda name: self._uses[self._numbers[name]])
        number = self._numbers[least]
        if self._uses[number] >= seen:
            return None
        del self._numbers[least], self._uses[number]
        self._tenants[least[0].tenant] -= 1
        if not self._tenants[least[0].tenant]:
            del self._tenants[least[0].tenant]
        return number


@dataclass(frozen=True, slots=True, eq=False)
class ToldSeen:
    """A copy of what was seen in all rows."""

    returned: Array
    departed: Array
    """[ROWS, age] weights, as in returns.Observed."""
    names: Ints
    """[ROWS] what stands in each: NOTHING, or a name that is used once."""
    contexts: Ints
    kinds: Ints
    """[ROWS] of what it is."""

    def worths(
        self, names: Ints, ages: Ints, weights: Array, run: float, p: Array, q: Array, classes: Ints
    ) -> Array:
        """[ROWS, age] returns a second, 0 where nothing stands. Pure. Cost: some milliseconds.

        Args:
            names, ages, weights: of each open run; the name is that of its row, or NOTHING.
            run: the mean weight of a run: the unit.
            p: [ROWS] the estimate without contexts of the row's kind,
            q: [class, age] of all classes,
            classes: [ROWS] and that of its kind.
        """
        rows = names % ROWS
        here = (names != NOTHING) & (self.names[rows] == names)
        cells = rows[here] * NUM_AGES + ages[here]
        counts = np.bincount(cells, weights[here], ROWS * NUM_AGES).reshape(ROWS, NUM_AGES)
        used, worths = np.flatnonzero(self.names != NOTHING), np.zeros((ROWS, NUM_AGES))
        if not len(used):  # contexts that had rows were given up for some that have none yet
            return worths
        contexts = np.unique(self.contexts[used], return_inverse=True)[1]
        gaps = contexts * len(q) + classes[used]
        waiting, returned = (self.departed + counts)[used] / run, self.returned[used] / run
        worths[used] = fit_told(returned, waiting, contexts, gaps, p[used], q[classes[used]])
        return worths


class ToldReturns:
    """Tables of what was seen in each context. State: 1.5 MB.

    A row is known by a name that is used once, so that what was begun in it is not taken for that
    of another context later.
    """

    def __init__(self) -> None:
        self._contexts = Contexts()
        self._rows: dict[int, dict[int, int]] = {}  # context -> kind -> the name of a row
        self._free = deque(range(ROWS))  # what was freed last is used last
        self._num_named = 0
        self._names = np.full(ROWS, NOTHING)
        self._context_of, self._kind_of = np.full(ROWS, NOTHING), np.full(ROWS, NOTHING)
        self._returned = np.zeros((ROWS, NUM_AGES))
        self._departed = np.zeros((ROWS, NUM_AGES))

    def __len__(self) -> int:
        return len(self._contexts)

    def context(self, told: Told, ending: Hashable = None) -> int:
        """The number of this context, which was seen once more, or NOTHING. Cost: that of
        Contexts.number(), and CONTEXT_ROWS where another one is given up."""
        number, given_up = self._contexts.number(told, ending)
        for name in self._rows.pop(given_up, {}).values():
            row = name % ROWS
            self._names[row] = NOTHING
            self._returned[row] = self._departed[row] = 0.0
            self._free.append(row)
        if number != NOTHING:
            self._rows.setdefault(number, {})
        return number

    def follow(self, context: int, kind: int) -> int:
        """The name of the row in which a run of this context and kind is followed, or NOTHING."""
        rows = self._rows.get(context)
        if rows is None:
            return NOTHING
        name = rows.get(kind)
        if name is None:
            if len(rows) >= CONTEXT_ROWS:
                return NOTHING
            row = self._free.popleft()
            self._num_named += 1
            name = rows[kind] = self._num_named * ROWS + row
            self._names[row], self._context_of[row], self._kind_of[row] = name, context, kind
        return name

    def close(self, name: int, age: int, weight: float, *, returned: bool) -> None:
        """A run that was followed in this row has returned, or is followed no more."""
        row = name % ROWS
        if name != NOTHING and self._names[row] == name:
            table = self._returned if returned else self._departed
            table[row, age] += weight

    def name(self, context: int, kind: int) -> int:
        """That of the row of such runs, or NOTHING: they have none, or their context has gone."""
        rows = self._rows.get(context)
        return NOTHING if rows is None else rows.get(kind, NOTHING)

    def seen(self) -> ToldSeen | None:
        """None: no context was ever known."""
        if not self._num_named:
            return None
        return ToldSeen(
            self._returned.copy(),
            self._departed.copy(),
            self._names.copy(),
            self._context_of.copy(),
            self._kind_of.copy(),
        )

    def halve(self) -> None:
        self._returned *= 0.5
        self._departed *= 0.5


def fit_told(
    returned: Array, waiting: Array, contexts: Ints, gaps: Ints, p: Array, q: Array
) -> Array:
    """The worth of runs of each row. Pure. Cost: as the fit without contexts.

    A context shifts the odds to return of all its kinds together; each of them, and each of its
    gaps, then goes its own way as far as there is evidence for it.

    Args:
        returned, waiting: [row, age] runs that returned at that age; that have not up to it.
        contexts, gaps: [row] its context, from 0 on; its class of gaps, in which context.
        p: [row] the estimates without contexts: of a return at all,
        q: [row, age] and in this age, if not before.
    Returns: [row, age] returns a second.
    """
    returned_sum, total = returned.sum(axis=1), (returned + waiting).sum(axis=1)
    p = np.clip(p, 1e-6, 1 - 1e-6)
    odds = np.log(p / (1 - p))
    shift = np.zeros(contexts.max() + 1)
    groups = np.unique(gaps, return_inverse=True)[1]
    prior = np.zeros((groups.max() + 1, NUM_AGES))
    prior[groups] = q
    return_p, return_q = p, q
    for _ in range(ROUNDS):
        after = np.cumprod(1 - return_q, axis=1)
        before = np.concatenate([np.ones((len(after), 1)), after[:, :-1]], axis=1)
        left = return_p[:, None] * (after + before) / 2
        will_return = waiting * left / (1 - return_p[:, None] + left)
        positive = returned_sum + will_return.sum(axis=1)
        for _ in range(2):  # Newton's method
            mean = logistic(odds + shift[contexts])
            slope = _sums(positive - total * mean, contexts) - RIDGE * shift
            curvature = _sums(total * mean * (1 - mean), contexts) + RIDGE
            shift = shift + np.clip(slope / curvature, -1, 1)
        shifted = logistic(odds + shift[contexts])
        return_p = (positive + CONTEXT_RUNS * shifted) / (total + CONTEXT_RUNS)
        by_group = np.zeros((2, *prior.shape))
        np.add.at(by_group[0], groups, returned)
        np.add.at(by_group[1], groups, will_return)
        own = hazard(by_group[0], by_group[1], prior, CONTEXT_RUNS)
        return_q = np.clip(own, 1e-6, 0.999)[groups]
    return gittins(return_p, return_q)


def _sums(values: Array, contexts: Ints) -> Array:
    return np.asarray(np.bincount(contexts, values, contexts.max() + 1), np.float64)
