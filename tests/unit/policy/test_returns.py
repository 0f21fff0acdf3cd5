# SPDX-License-Identifier: Apache-2.0
"""The estimator finds out what returns and when, from what was seen so far and no more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import pytest

from attnstore_vllm.policy import returns
from attnstore_vllm.policy.ages import EDGES_S, age_of
from attnstore_vllm.policy.returns import (
    NUM_KINDS,
    ReturnEstimator,
    answered,
    kind_of,
)

FIRST = kind_of(1, None, 1000, is_fresh=True, is_shared=False)
SECOND = kind_of(2, 30.0, 1000, is_fresh=False, is_shared=False)


def learn(estimator: ReturnEstimator, now: float) -> None:
    """What the store's thread does."""
    if estimator.is_due:
        estimator.refit(now)


def drive(
    kinds: dict[int, tuple[float, Callable[[Random], float]]], seconds: float, rate: float = 1.0
) -> ReturnEstimator:
    """Runs of each kind are opened at random times; each returns, once, with a probability."""
    estimator, rng = ReturnEstimator(), Random(1)
    events: list[tuple[float, int, int]] = []  # (time, end, kind, or -1 for a return)
    end = 0
    for kind, (probability, gap_s) in kinds.items():
        now = 0.0
        while now < seconds:
            end += 1
            events.append((now, end, kind))
            if rng.random() < probability:
                events.append((now + gap_s(rng), end, -1))
            now += rng.expovariate(rate)
    for now, end, kind in sorted(events):
        if now > seconds:
            break
        if kind < 0:
            estimator.arrive([end], now)
        else:
            estimator.open(end, kind, 1, 4.0, now)
        learn(estimator, now)
    return estimator


def test_kinds_are_told_apart() -> None:
    kinds = set[int]()
    for turn in (1, 2, 3, 4, 9):
        for gap in (None, 1.0, 20.0, 100.0, 1e5):
            for length in (1, 4096, 10_000, 100_000):
                for fresh in (False, True):
                    for shared in (False, True):
                        kind = kind_of(turn, gap, length, is_fresh=fresh, is_shared=shared)
                        kinds.update(answered(kind, tokens) for tokens in (0, 64, 256, 5000))
                        assert answered(kind, 0) == kind  # as long as nothing is known of it
    assert kinds == set(range(NUM_KINDS))


def test_a_second_answer_takes_the_place_of_the_first() -> None:
    assert answered(answered(SECOND, 2000), 100) == answered(SECOND, 100)


def test_it_learns_what_answers_tell() -> None:
    """Of runs that are alike but for their answers, those with a long one return."""
    estimator, rng = ReturnEstimator(), Random(1)
    for end in range(2000):
        now, is_long = float(end), rng.random() < 0.5
        number = estimator.open(end, SECOND, 1, 4.0, now)
        estimator.change(number, answered(SECOND, 600 if is_long else 20))
        if is_long:
            estimator.arrive([end], now + 30.0)
        learn(estimator, now + 30.0)
    assert estimator.returns(answered(SECOND, 600)) > 0.9
    assert estimator.returns(answered(SECOND, 20)) < 0.1


def test_a_run_that_is_not_open_is_not_changed() -> None:
    estimator = ReturnEstimator()
    number = estimator.open(1, SECOND, 1, 4.0, 0.0)
    estimator.arrive([1], 10.0)
    estimator.open(2, SECOND, 1, 4.0, 10.0)
    estimator.change(number, answered(SECOND, 600))
    estimator.change(number + returns.RUNS_MAX + 1, answered(SECOND, 600))  # of the same place
    estimator.arrive([2], 20.0)
    seen = estimator.seen(20.0)
    assert seen.returned[SECOND].sum() == 8.0


def test_ages_rise_and_end() -> None:
    assert [age_of(s) for s in (0.0, 3.99, 4.0, 6.0, 8.0, 1e12)] == [0, 0, 1, 2, 3, 39]
    for number, edge in enumerate(EDGES_S[1:-1], 1):
        assert age_of(float(edge) * 1.001) == number


def test_before_anything_was_seen_the_order_is_lru() -> None:
    estimator = ReturnEstimator()
    worth = [
        [estimator.worth(kind, seconds) for seconds in (0.0, *EDGES_S[1:] * 1.001)]
        for kind in range(NUM_KINDS)
    ]
    assert all(row == worth[0] for row in worth)
    falling = worth[0][:-1]
    assert all(later < sooner for sooner, later in itertools.pairwise(falling))


def test_it_learns_what_returns() -> None:
    estimator = drive(
        {
            FIRST: (0.1, lambda rng: rng.lognormvariate(4, 0.5)),
            SECOND: (0.9, lambda rng: rng.lognormvariate(4, 0.5)),
        },
        6000,
    )
    assert estimator.returns(FIRST) == pytest.approx(0.1, abs=0.04)
    assert estimator.returns(SECOND) == pytest.approx(0.9, abs=0.04)
    assert estimator.worth(SECOND, 5.0) > 5 * estimator.worth(FIRST, 5.0)


def test_what_is_still_open_is_not_taken_for_lost() -> None:
    """Half of what will return has not returned yet when the clock stops: 0.4 of all have."""
    estimator = drive({FIRST: (0.8, lambda rng: rng.uniform(100, 1500))}, 1600)
    assert 0.6 < estimator.returns(FIRST) < 0.9


def test_it_learns_when_it_returns() -> None:
    """All return after 300 to 400 s: until then a run grows worth more, after that nothing."""
    estimator = drive({SECOND: (1.0, lambda rng: rng.uniform(300, 400))}, 20_000)
    worth = [estimator.worth(SECOND, seconds) for seconds in (2.0, 100.0, 260.0, 900.0)]
    assert worth[0] < worth[1] < worth[2]
    assert worth[3] < worth[0] / 2


def test_a_coarse_clock_does_not_make_the_newest_worth_most() -> None:
    """Of a hundred runs three return within a tick of 3 s, by such a clock at once: a hundredth
    in each of its seconds. The others that return do so between 60 and 90 s, at a like rate."""

    def gap_s(rng: Random) -> float:
        return 0.01 if rng.random() < 0.1 else rng.uniform(60, 90)

    estimator = drive({FIRST: (0.3, gap_s)}, 6000)
    assert estimator.worth(FIRST, 0.0) < 2 * estimator.worth(FIRST, 60.0)


def test_a_kind_that_was_not_seen_borrows_from_its_factors() -> None:
    seen = {
        kind_of(turn, gap, 1000, is_fresh=False, is_shared=False): (
            0.9 if turn == 2 else 0.1, lambda rng: rng.lognormvariate(4, 0.5),
        )
        for turn in (2, 3) for gap in (5.0, 30.0)
    }  # fmt: skip
    estimator = drive(seen, 3000)
    unseen = [kind_of(t, 30.0, 50_000, is_fresh=False, is_shared=False) for t in (2, 3)]
    assert estimator.returns(unseen[0]) > 0.6
    assert estimator.returns(unseen[1]) < 0.4


def test_a_request_ends_all_runs_it_goes_through() -> None:
    estimator = ReturnEstimator()
    shared = estimator.open(3, FIRST, 0, 1.0, 10.0)
    own = estimator.open(7, SECOND, 2, 4.0, 20.0)
    other = estimator.open(8, SECOND, 5, 4.0, 20.0)
    before = estimator.arrive([1, 3, 5, 7, 9], 60.0)
    assert before is not None
    assert (before.number, before.depth, before.turn, before.since) == (own, 4, 2, 20.0)
    assert len({shared, own, other}) == 3
    assert len(estimator) == 1
    assert estimator.arrive([1, 3, 5, 7, 9], 61.0) is None
    assert estimator.arrive([8], 61.0) is not None


def test_an_end_that_is_opened_again_has_returned() -> None:
    estimator = ReturnEstimator()
    for second in range(3 * returns.REFIT_RUNS):
        estimator.open(1, FIRST, 1, 1.0, float(second))
        learn(estimator, float(second))
    assert len(estimator) == 1
    assert estimator.returns(FIRST) > 0.9


def test_its_state_is_bounded_and_what_it_gives_up_counts_as_not_returned() -> None:
    estimator = ReturnEstimator()
    before = estimator.worth(FIRST, 10.0)
    for number in range(returns.RUNS_MAX + 5000):
        estimator.open(number, FIRST, 1, 1.0, number / 100)
        learn(estimator, number / 100)
    assert len(estimator) == returns.RUNS_MAX
    assert estimator.arrive([0], 1e4) is None
    assert estimator.arrive([5000], 1e4) is not None
    # Whether it returns later than was ever seen, or never, cannot be told; the worth can.
    assert estimator.worth(FIRST, 10.0) < before / 20


def test_the_same_calls_give_the_same_worth() -> None:
    kinds: dict[int, tuple[float, Callable[[Random], float]]] = {
        FIRST: (0.3, lambda rng: rng.expovariate(0.01)),
    }
    one, other = drive(kinds, 3000), drive(kinds, 3000)
    assert [one.worth(FIRST, s) for s in (0.0, 10.0, 1e3)] == [
        other.worth(FIRST, s) for s in (0.0, 10.0, 1e3)
    ]
