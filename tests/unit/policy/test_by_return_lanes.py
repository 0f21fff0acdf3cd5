# SPDX-License-Identifier: Apache-2.0
"""The order that servers use against the plain rule, and what a decision costs with many lanes.

Clients choose how many lanes there are: a kind follows from turns, gaps, lengths and answers, and
each priority has its own. The rule looks at both ends of each; the order has to say the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm.policy.ages import EDGES_S, NUM_AGES, age_of, ages_of
from attnstore_vllm.policy.eviction.by_return import (
    ENDS_MAX,
    KEYS_MAX,
    PRIORITY_FACTORS,
    VICTIMS_MAX,
    AgeLane,
    ByReturn,
    by_return,
)
from attnstore_vllm.policy.eviction.departures import Departures, departures
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import NUM_KINDS, Fit, ReturnEstimator, kind_of
from attnstore_vllm.policy.told import NOTHING, ROWS
from attnstore_vllm.policy.visits import Run, answer

KINDS = [
    kind_of(turn, gap, tokens, is_fresh=True, is_shared=shared)
    for turn, gap in ((1, None), (3, 20.0))
    for tokens in (100, 40_000)
    for shared in (False, True)
]


class Rule:
    """Both ends of every lane, each time: what ByReturn has to say, without its means."""

    def __init__(self, estimator: ReturnEstimator) -> None:
        self._estimator = estimator
        self.lanes: dict[Hashable, OrderedDict[Run, None]] = {}
        self._lane_of: dict[Run, Hashable] = {}
        self._poorest: Run | None = None
        self._victims_left = 0

    def worth(self, run: Run, now: float) -> tuple[float, bool]:
        factor = PRIORITY_FACTORS[run.priority]
        return factor * self._estimator.worth(run.kind, now - run.since), run.is_shared

    def add(self, run: Run) -> None:
        name = self._lane_of[run] = (run.kind, run.priority, run.is_shared)
        self.lanes.setdefault(name, OrderedDict())[run] = None
        self._poorest = None

    def rank(self, run: Run) -> None:
        if (run.kind, run.priority, run.is_shared) != self._lane_of[run]:
            self.remove(run)
            self.add(run)

    def remove(self, run: Run) -> None:
        name = self._lane_of.pop(run)
        del self.lanes[name][run]
        if not self.lanes[name]:
            del self.lanes[name]
        if run is self._poorest:
            self._poorest = None

    def victim(self, now: float, can_go: Callable[[Run], bool]) -> Run | None:
        if self._poorest is not None and self._victims_left:
            self._victims_left -= 1
            if can_go(self._poorest):
                return self._poorest
        self._victims_left = VICTIMS_MAX
        found, least = None, (0.0, False)
        for lane in self.lanes.values():
            for end in (iter(lane), reversed(lane)):
                for _, run in zip(range(KEYS_MAX), end, strict=False):
                    if not can_go(run):
                        continue
                    worth = self.worth(run, now)
                    if found is None or worth < least:
                        found, least, self._poorest = run, worth, run
                    break
        return found

    def last(self, now: float) -> Run | None:
        newest = (next(reversed(lane)) for lane in self.lanes.values())
        return max(newest, key=lambda run: self.worth(run, now), default=None)


def learned(seed: int) -> Fit:
    """What an estimator may have learned: worths that rise and fall, and are the same for some."""
    rng = np.random.default_rng(seed)
    worths = np.round(rng.random((NUM_KINDS, NUM_AGES)), 1 if seed % 2 else 9) + 0.01
    return Fit(np.zeros(0), np.zeros(0), np.zeros(0), worths)  # refit() is not called


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("came"), st.integers(0, 7), st.sampled_from([-3, -2, -1, 0, 0, 1])),
        st.tuples(st.just("came long ago"), st.integers(0, 7), st.sampled_from([0, 50, 9000])),
        st.tuples(st.just("left"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("answered"), st.integers(0, 30), st.sampled_from([20, 600, 5000])),
        st.tuples(st.just("time"), st.integers(0, 3), st.sampled_from([1, 7, 4000])),
        st.tuples(st.just("the clock"), st.integers(0, 3), st.just(-5)),
        st.tuples(st.just("learned"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("evicted"), st.integers(1, 3), st.just(0)),
    ),
    max_size=60,
)


class Both:
    """The order and the rule, told the same."""

    def __init__(self) -> None:
        self.estimator = ReturnEstimator()
        self.rule, self.order = Rule(self.estimator), by_return(self.estimator)
        self.now = 1000.0
        self.here: list[Run] = []

    def step(self, what: str, number: int, value: int) -> None:
        match what:
            case "came" | "came long ago":
                kind, age = KINDS[number], value if what == "came long ago" else 0
                shared = number % 2 == 1
                priority = value if what == "came" else 0
                run = Run(0, kind, self.now - age, shared, Priority(priority))
                self.here.append(run)
                for order in (self.rule, self.order):
                    order.add(run)
            case "left" if self.here:
                self.remove(self.here[number % len(self.here)])
            case "answered" if self.here:
                run = self.here[number % len(self.here)]
                answer(run, value, self.estimator, self.now)
                for order in (self.rule, self.order):
                    order.rank(run)
            case "time" | "the clock":
                self.now += number * value
            case "learned":
                self.estimator.learn(learned(number))
            case "evicted":
                for _ in range(number):
                    victim = self.check(lambda run: True)
                    if victim is not None:
                        self.remove(victim)

    def remove(self, run: Run) -> None:
        self.here.remove(run)
        for order in (self.rule, self.order):
            order.remove(run)

    def check(self, can_go: Callable[[Run], bool]) -> Run | None:
        wanted = self.rule.victim(self.now, can_go)
        assert self.order.victim(self.now, can_go) is wanted
        assert self.order.last(self.now) is self.rule.last(self.now)
        return wanted


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_the_order_says_what_the_rule_says(steps: list[tuple[str, int, int]]) -> None:
    both = Both()
    for step in steps:
        both.step(*step)
        both.check(lambda run: True)
    both.step("evicted", len(both.here), 0)
    assert not both.rule.lanes
    assert not both.order.places, "empty lanes take no room"


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sets(st.integers(0, 30)))
def test_what_is_held_hides_no_end_that_is_worth_less(
    steps: list[tuple[str, int, int]], held: set[int]
) -> None:
    both = Both()
    for step in steps:
        both.step(*step)
    can_go = {run for number, run in enumerate(both.here) if number not in held}
    found = both.order.victim(both.now, can_go.__contains__)
    lanes = both.rule.lanes.values()
    ends = [run for lane in lanes for run in (next(iter(lane)), next(reversed(lane)))]
    free = [both.rule.worth(run, both.now) for run in ends if run in can_go]
    near = [run for lane in lanes for run in (*list(lane)[:KEYS_MAX], *list(lane)[-KEYS_MAX:])]
    assert (found is None) == (not can_go.intersection(near))
    if found is not None:
        assert found in can_go
        assert not free or both.rule.worth(found, both.now) <= min(free)


def many(order: Departures, lanes: int, a_lane: int = 4) -> list[Run]:
    """Runs of so many kinds and priorities; slots 0 to lanes * a_lane - 1."""
    cells = [
        (kind, priority)
        for priority in Priority
        if priority > Priority.ENDED
        for kind in range(NUM_KINDS)
    ]
    Random(1).shuffle(cells)
    runs = []
    for slot in range(lanes * a_lane):
        kind, priority = cells[slot % lanes]
        runs.append(Run(0, kind, slot * 0.01, False, priority))
        order.add(slot, runs[-1])
    return runs


def noted(asked: list[int], slot: int, answer: bool) -> bool:
    asked.append(slot)
    return answer


@pytest.mark.parametrize("lanes", [1, 100, 4000])
def test_many_lanes_cost_a_decision_no_more_looks(lanes: int) -> None:
    order = departures("attnstore", 4 * lanes, ReturnEstimator())
    many(order, lanes)
    asked: list[int] = []
    for number in range(3):
        slot = order.victim(1000.0 + 60 * number, lambda slot: noted(asked, slot, True))
        assert slot is not None
        order.remove(slot)
    assert len(asked) == 3
    asked.clear()
    assert order.victim(1200.0, lambda slot: noted(asked, slot, False)) is None
    assert len(asked) <= 1 + ENDS_MAX * KEYS_MAX


def test_ends_that_are_held_hide_the_others_for_a_while_only() -> None:
    """However many: each decision goes on where the last one has ended."""
    lanes = 20 * ENDS_MAX
    order = departures("attnstore", lanes, ReturnEstimator())
    runs = many(order, lanes, 1)
    free = max(range(lanes), key=lambda slot: order.worth(runs[slot], 1000.0))
    decisions = 1
    while order.victim(1000.0, lambda slot: slot == free) is None:
        decisions += 1
    assert decisions <= 2 * lanes // ENDS_MAX + 1
    assert order.last(1000.0) is not None
    least = min(range(lanes), key=lambda slot: order.worth(runs[slot], 1000.0))
    order.remove(free)
    victim = order.victim(1000.0, lambda slot: True)
    assert victim is not None
    assert order.worth(runs[victim], 1000.0) == order.worth(runs[least], 1000.0)


def test_lanes_that_come_and_go_take_no_memory() -> None:
    order = by_return(ReturnEstimator())
    for number in range(3 * NUM_KINDS):
        run = Run(0, number % NUM_KINDS, float(number), False)
        order.add(run)
        assert max(order.places.values()) < 16
        order.remove(run)
    assert not order.places
    assert order.victim(1e9, lambda run: True) is None
    assert order.last(1e9) is None


def test_keys_may_be_anything() -> None:
    none = np.zeros(0)
    fit = Fit(none, none, none, np.array([[3.0] * NUM_AGES, [1.0] * NUM_AGES]))
    order = ByReturn[str](
        lambda key: AgeLane(int(key == "b"), 1.0, False), lambda key: 0.0, lambda: fit
    )
    for key in "abc":
        order.add(key)
    assert order.victim(9.0, lambda key: True) == "b"
    assert order.last(9.0) == "c"


def test_what_a_context_has_left_is_judged_by_its_kind_once_its_row_is_anothers() -> None:
    """They stand in one lane. The kind says 1, the row's new owner 5, and what lies between 3."""
    row, none = 5, np.zeros(0)
    gone, new = ROWS + row, 2 * ROWS + row
    names, worths = np.full(ROWS, NOTHING), np.full((NUM_KINDS + ROWS, NUM_AGES), 9.0)
    names[row] = new
    worths[1], worths[2], worths[NUM_KINDS + row] = 1.0, 3.0, 5.0
    fit = Fit(none, none, none, worths, names)
    lanes = {
        "gone": AgeLane(1, 1.0, False, gone),
        "gone too": AgeLane(1, 1.0, False, gone),
        "gone last": AgeLane(1, 1.0, False, gone),
        "other": AgeLane(2, 1.0, False),
        "new": AgeLane(1, 1.0, False, new),
    }
    order = ByReturn[str](lambda key: lanes[key], lambda key: 0.0, lambda: fit)
    for key in lanes:
        order.add(key)
        if key == "gone last":  # from here on its context is known no more
            for name in ("gone", "gone too", "gone last"):
                lanes[name] = AgeLane(1, 1.0, False)
    assert len(order.places) == 2
    left = []
    for _ in range(len(lanes)):
        victim = order.victim(9.0, lambda key: True)
        assert victim is not None
        left.append(victim)
        order.remove(victim)
    assert left == ["gone", "gone too", "gone last", "other", "new"]


def test_a_row_that_is_another_contexts_is_seen_when_a_key_is_ranked() -> None:
    row, none = 5, np.zeros(0)
    names, worths = np.full(ROWS, NOTHING), np.full((NUM_KINDS + ROWS, NUM_AGES), 9.0)
    names[row], worths[1], worths[NUM_KINDS + row] = 2 * ROWS + row, 1.0, 5.0
    fit = Fit(none, none, none, worths, names)
    lanes = {"a": AgeLane(1, 1.0, False, ROWS + row), "b": AgeLane(1, 2.0, False)}
    order = ByReturn[str](lambda key: lanes[key], lambda key: 0.0, lambda: fit)
    order.add("a")
    order.add("b")
    assert order.victim(9.0, lambda key: True) == "a"
    lanes["a"] = AgeLane(1, 1.0, False, 2 * ROWS + row)
    order.rank("a")
    order.remove("b")
    order.add("b")  # nothing is remembered of the last decision
    assert order.victim(9.0, lambda key: True) == "b"


def test_the_first_slots_that_have_left_are_passed_once() -> None:
    """As those of a long prompt that are written one after another."""
    order = departures("attnstore", 10_000, ReturnEstimator())
    run = Run(0, KINDS[0], 0.0, False)
    order.add_all(range(10_000), run)
    for slot in range(4000):
        assert order.last(1.0) == slot
        order.remove(slot)
    (group,) = order.groups.values()
    assert group.first == 3999
    order.add(7, run)
    assert order.last(1.0) == 4000
    for slot in range(4000, 10_000):
        order.remove(slot)
    assert order.last(1.0) == 7


def test_an_age_is_the_same_for_one_and_for_many() -> None:
    times = np.concatenate([EDGES_S, np.nextafter(EDGES_S, -1), np.nextafter(EDGES_S, np.inf)])
    assert ages_of(times).tolist() == [age_of(seconds) for seconds in times.tolist()]
    assert (age_of(-1.0), age_of(0.0), age_of(1e12)) == (0, 0, NUM_AGES - 1)
