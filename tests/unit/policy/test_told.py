# SPDX-License-Identifier: Apache-2.0
"""What clients tell of when they come back is learned, within bounds and within a tenant."""

from __future__ import annotations

from random import Random

import pytest

from attnstore_vllm.policy.ages import age_of
from attnstore_vllm.policy.returns import NUM_KINDS, ReturnEstimator, kind_of
from attnstore_vllm.policy.told import (
    CANDIDATES_MAX,
    PARTS,
    PLACES,
    ROWS,
    SEEN_MIN,
    TENANT_PLACES,
    Contexts,
    Told,
)
from attnstore_vllm.policy.visits import NO_TERMS, Run, Terms, answer, visit_of

KIND = kind_of(2, 30.0, 1000, is_fresh=False, is_shared=False)
SHARED = kind_of(2, 30.0, 1000, is_fresh=False, is_shared=True)
QUICK, SLOW = Told(b"a", "coder", "read_file"), Told(b"a", "coder", "build")


def drive(tools: dict[Told | None, tuple[float, float]], number: int = 600) -> ReturnEstimator:
    """Runs of one kind, by what is told of them: probability to return, and seconds until then."""
    estimator, random = ReturnEstimator(), Random(1)
    events = list[tuple[float, int, Told | None, bool]]()
    end = 0
    for told, (probability, gap_s) in tools.items():
        for n in range(number):
            end += 1
            events.append((3.0 * n, end, told, False))
            if random.random() < probability:
                events.append((3.0 * n + gap_s, end, told, True))
    for now, end, told, returns in sorted(events, key=lambda one: one[:2]):
        if returns:
            estimator.arrive([end], now)
        else:
            place = estimator.told.contexts.place(told) if told is not None else -1
            estimator.open(end, KIND, 2, 4.0, now, context=place)
        if estimator.is_due:
            estimator.refit(now)
    estimator.refit(3.0 * number)
    return estimator


def worth(estimator: ReturnEstimator, told: Told, seconds: float) -> float:
    place = estimator.told.contexts.place(told)
    row = estimator.row(KIND, place)
    assert row >= NUM_KINDS, "nothing was learned of it"
    return float(estimator.worths[row, age_of(seconds)])


def test_a_session_that_waits_for_a_tool_of_known_length_is_kept_until_then() -> None:
    estimator = drive({QUICK: (0.95, 6.0), SLOW: (0.95, 300.0)})
    assert worth(estimator, SLOW, 200.0) > 3 * worth(estimator, QUICK, 200.0)
    assert worth(estimator, QUICK, 5.0) > 3 * worth(estimator, SLOW, 5.0)


def test_what_returns_seldom_is_worth_less() -> None:
    estimator = drive({QUICK: (0.9, 60.0), SLOW: (0.1, 60.0)})
    assert worth(estimator, QUICK, 10.0) > 2 * worth(estimator, SLOW, 10.0)


def test_few_runs_say_what_is_said_without_them() -> None:
    estimator = drive({None: (0.5, 60.0)})
    for _ in range(SEEN_MIN):
        place = estimator.told.contexts.place(QUICK)
    estimator.open(10**9, KIND, 2, 4.0, 5000.0, context=place)
    estimator.refit(5000.0)
    row = estimator.row(KIND, place)
    assert row >= NUM_KINDS
    for age in range(10):
        assert estimator.worths[row, age] == pytest.approx(estimator.worths[KIND, age], rel=0.1)


def test_before_anything_was_learned_of_a_context_nothing_changes() -> None:
    estimator = ReturnEstimator()
    for _ in range(SEEN_MIN):
        place = estimator.told.contexts.place(QUICK)
    assert place >= 0
    assert estimator.row(KIND, place) == KIND
    assert estimator.row(KIND, -1) == KIND


def test_what_others_share_is_of_no_context() -> None:
    estimator = drive({QUICK: (0.9, 60.0)}, number=300)
    place = estimator.told.contexts.place(QUICK)
    assert estimator.row(SHARED, place) == SHARED
    assert NUM_KINDS <= estimator.row(KIND, place) < NUM_KINDS + ROWS


def test_the_estimate_without_contexts_learns_the_same_from_all() -> None:
    told, untold = drive({QUICK: (0.6, 60.0)}), drive({None: (0.6, 60.0)})
    assert (told.worths[:NUM_KINDS] == untold.worths).all()
    assert len(untold.worths) == NUM_KINDS


def test_no_client_makes_it_grow() -> None:
    contexts = Contexts()
    for n in range(4 * CANDIDATES_MAX):
        for _ in range(SEEN_MIN):
            place = contexts.place(Told(b"%d" % (n % 3), str(n), "x" * 64))
            assert -1 <= place < PLACES
    assert len(contexts) <= PLACES
    assert contexts.num_candidates <= CANDIDATES_MAX


def test_one_tenant_leaves_places_to_others() -> None:
    contexts = Contexts()
    for n in range(10 * PLACES):
        for _ in range(SEEN_MIN + n):
            contexts.place(Told(b"greedy", str(n)))
    assert len(contexts) == TENANT_PLACES
    places = {contexts.place(Told(b"other", "agent")) for _ in range(SEEN_MIN + 1)}
    assert max(places) >= 0


def test_tenants_have_contexts_of_their_own() -> None:
    contexts = Contexts()
    for _ in range(SEEN_MIN):
        one, other = contexts.place(Told(b"a", "x", "y")), contexts.place(Told(b"b", "x", "y"))
    assert one >= 0
    assert other >= 0
    assert one != other


def test_a_place_with_open_runs_is_given_to_no_other_context() -> None:
    contexts = Contexts()
    for n in range(TENANT_PLACES):
        for _ in range(SEEN_MIN):
            place = contexts.place(Told(b"a", str(n)))
        contexts.open_runs[place] = 1
    for _ in range(10 * SEEN_MIN):
        assert contexts.place(Told(b"a", "new")) not in range(TENANT_PLACES)


def test_a_place_that_is_given_away_forgets_what_it_has_learned() -> None:
    estimator = drive({QUICK: (0.9, 60.0)}, number=300)
    contexts = estimator.told.contexts
    place = contexts.place(QUICK)
    assert estimator.row(KIND, place) >= NUM_KINDS
    contexts.serials[place] += 1
    assert estimator.row(KIND, place) == KIND
    estimator.told.open(place)
    seen = estimator.told.seen()
    assert seen is not None
    assert not seen.returned[place * PARTS : (place + 1) * PARTS].any()


def test_a_call_of_a_tool_is_told_by_how_the_answer_ends() -> None:
    estimator = ReturnEstimator()
    runs = list[Run]()
    for n in range(4 * SEEN_MIN):
        visit = visit_of(estimator, [], [n + 1], 100, float(n), Terms(told=Told(b"a")))
        answer(visit.own, 10, estimator, float(n), (7, 8) if n % 2 else (5, 6))
        runs.append(visit.own)
    assert runs[-1].context >= 0
    assert runs[-2].context >= 0
    assert runs[-1].context != runs[-2].context


def test_without_a_hint_no_ending_is_read() -> None:
    estimator = ReturnEstimator()
    for n in range(4 * SEEN_MIN):
        visit = visit_of(estimator, [], [n + 1], 100, float(n), NO_TERMS)
        answer(visit.own, 10, estimator, float(n), (7, 8))
        assert visit.own.context == -1
    assert len(estimator.told.contexts) == 0


def test_open_runs_are_counted_to_the_end() -> None:
    estimator = drive({QUICK: (1.0, 6.0), SLOW: (0.5, 60.0)}, number=200)
    contexts = estimator.told.contexts
    open_in = estimator.seen(600.0).context
    counted = [(open_in == place).sum() for place in range(PLACES)]
    assert contexts.open_runs == counted
    for mark in range(1, 401):
        estimator.arrive([mark], 10_000.0)
    assert contexts.open_runs == [0] * PLACES
