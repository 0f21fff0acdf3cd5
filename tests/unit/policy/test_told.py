# SPDX-License-Identifier: Apache-2.0
"""What clients tell of when they come back is learned, within bounds and within a tenant."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from attnstore_vllm.policy import told as policy
from attnstore_vllm.policy.ages import age_of
from attnstore_vllm.policy.eviction.by_return import FEW, by_return
from attnstore_vllm.policy.returns import NUM_KINDS, ReturnEstimator, kind_of
from attnstore_vllm.policy.told import (
    CONTEXT_ROWS,
    NOTHING,
    PLACES,
    ROWS,
    SEEN_MIN,
    TENANT_PLACES,
    Contexts,
    Told,
)
from attnstore_vllm.policy.visits import NO_TERMS, Run, Terms, answer, visit_of

KIND = kind_of(2, 30.0, 1000, is_fresh=False, is_shared=False)
FIRST = kind_of(1, None, 1000, is_fresh=True, is_shared=False)
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
            context = estimator.told.context(told) if told is not None else NOTHING
            run = estimator.open(end, KIND, 2, 4.0, now)
            estimator.change(run, KIND, context)
        if estimator.is_due:
            estimator.refit(now)
    estimator.refit(3.0 * number)
    return estimator


def row_of(estimator: ReturnEstimator, kind: int, context: int) -> int:
    return estimator.fitted.row(kind, estimator.told.name(context, kind))


def worth(estimator: ReturnEstimator, told: Told, seconds: float) -> float:
    context = estimator.told.context(told)
    row = row_of(estimator, KIND, context)
    assert row >= NUM_KINDS, "nothing was learned of it"
    return float(estimator.fitted.worths[row, age_of(seconds)])


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
        context = estimator.told.context(QUICK)
    estimator.change(estimator.open(10**9, KIND, 2, 4.0, 5000.0), KIND, context)
    estimator.refit(5000.0)
    row = row_of(estimator, KIND, context)
    assert row >= NUM_KINDS
    for age in range(10):
        assert estimator.fitted.worths[row, age] == pytest.approx(
            estimator.fitted.worths[KIND, age], rel=0.1
        )


def test_before_anything_was_learned_of_a_context_nothing_changes() -> None:
    estimator = ReturnEstimator()
    for _ in range(SEEN_MIN):
        context = estimator.told.context(QUICK)
    assert context >= 0
    assert row_of(estimator, KIND, context) == KIND
    assert row_of(estimator, KIND, NOTHING) == KIND


def test_what_others_share_is_of_no_context() -> None:
    estimator = drive({QUICK: (0.9, 60.0)}, number=300)
    context = estimator.told.context(QUICK)
    assert row_of(estimator, SHARED, context) == SHARED
    assert NUM_KINDS <= row_of(estimator, KIND, context) < NUM_KINDS + ROWS


def test_what_others_share_later_is_of_no_context_any_more() -> None:
    estimator = drive({QUICK: (0.9, 60.0)}, number=300)
    order, context = by_return(estimator), estimator.told.context(QUICK)
    run = Run(1, KIND, 1000.0, False, told=QUICK, context=context)
    shared = replace(run, is_shared=True)
    assert order.worth(run, 1001.0) != estimator.worth(KIND, 1.0)
    assert order.worth(shared, 1001.0) == estimator.worth(KIND, 1.0)


def test_the_estimate_without_contexts_learns_the_same_from_all() -> None:
    told, untold = drive({QUICK: (0.6, 60.0)}), drive({None: (0.6, 60.0)})
    assert (told.fitted.worths[:NUM_KINDS] == untold.fitted.worths).all()
    assert len(untold.fitted.worths) == NUM_KINDS


def test_no_client_makes_it_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted and not known is forgotten for others."""
    monkeypatch.setattr(policy, "CANDIDATES_MAX", 3)
    contexts = Contexts()
    seldom = Told(b"a", "seldom")
    for _ in range(SEEN_MIN - 1):
        contexts.number(seldom)
    for n in range(3):
        contexts.number(Told(b"a", str(n)))
    assert contexts.number(seldom) == (NOTHING, NOTHING)


def test_no_client_has_more_contexts_than_there_are() -> None:
    contexts = Contexts()
    for n in range(4 * PLACES):
        for _ in range(SEEN_MIN):
            contexts.number(Told(b"%d" % (n % 3), str(n), "x" * 64))
    assert len(contexts) <= PLACES


def test_no_client_gets_more_rows_than_there_are() -> None:
    estimator = ReturnEstimator()
    told = estimator.told
    for n in range(2 * PLACES):
        for _ in range(SEEN_MIN + n):
            context = told.context(Told(b"%d" % (n % 3), str(n)))
        names = [told.follow(context, kind) for kind in range(NUM_KINDS)]
        assert sum(name != NOTHING for name in names) == CONTEXT_ROWS
    seen = told.seen()
    assert seen is not None
    assert (seen.names != NOTHING).sum() == ROWS


def test_one_tenant_leaves_contexts_to_others() -> None:
    contexts = Contexts()
    for n in range(10 * PLACES):
        for _ in range(SEEN_MIN + n):
            contexts.number(Told(b"greedy", str(n)))
    assert len(contexts) == TENANT_PLACES
    numbers = {contexts.number(Told(b"other", "agent"))[0] for _ in range(SEEN_MIN + 1)}
    assert max(numbers) >= 0
    assert len(contexts) == TENANT_PLACES + 1


def test_tenants_have_contexts_of_their_own() -> None:
    contexts = Contexts()
    for _ in range(SEEN_MIN):
        one, _ = contexts.number(Told(b"a", "x", "y"))
        other, _ = contexts.number(Told(b"b", "x", "y"))
    assert NOTHING not in (one, other)
    assert one != other


def test_no_run_counts_for_a_context_that_came_later() -> None:
    """A run is open when its context is given up. The one that has its row then learns nothing of
    it, and nothing is known of that one yet."""
    estimator = drive({QUICK: (0.9, 60.0)}, number=300)
    told, before = estimator.told, estimator.told.context(QUICK)
    estimator.change(estimator.open(10**9, KIND, 2, 4.0, 1000.0), KIND, before)
    for n in range(TENANT_PLACES):
        for _ in range(400):
            context = told.context(Told(b"a", str(n)))
        told.follow(context, KIND)
    assert row_of(estimator, KIND, before) == KIND
    taken = range(before + 1, context + 1)
    estimator.arrive([10**9], 1001.0)
    seen = told.seen()
    assert seen is not None
    assert not seen.returned.any()
    assert {row_of(estimator, KIND, context) for context in taken} == {KIND}
    assert not (estimator.seen(1001.0).row == NOTHING).all()


def test_what_is_stored_of_a_context_that_has_gone_is_worth_what_its_kind_is() -> None:
    """And never what was learned of the one that has its row then, which may be another tenant's.
    No run of the others has a whole chunk at first: there are no rows then."""
    estimator = drive({QUICK: (0.9, 60.0)}, number=300)
    told, order = estimator.told, by_return(estimator)
    run = Run(1, KIND, 1000.0, False, told=QUICK, context=told.context(QUICK))
    order.add(run)
    assert order.worth(run, 1001.0) != estimator.worth(KIND, 1.0)
    for n in range(PLACES):
        for _ in range(400):
            context = told.context(Told(b"%d" % (n % 4), str(n)))
    name = NOTHING
    for _ in range(2):
        if name != NOTHING:
            for _ in range(50):  # they return at once: worth much
                told.close(name, 0, 4.0, returned=True)
        estimator.refit(1001.0)
        assert order.worth(run, 1001.0) == estimator.worth(KIND, 1.0)
        others = [Run(2, kind, 1000.0, False) for kind in range(2 * FEW) if kind != KIND]
        for other in others:
            order.add(other)
        worst = min((run, *others), key=lambda one: estimator.worth(one.kind, 1.0))
        victim = order.victim(1001.0, lambda _: True)
        assert victim is not None
        assert estimator.worth(victim.kind, 1.0) == estimator.worth(worst.kind, 1.0)
        assert (victim is run) == (worst is run)
        for other in others:
            order.remove(other)
        name = told.follow(context, KIND)
    assert row_of(estimator, KIND, context) == NUM_KINDS + name % ROWS


def test_a_context_that_returns_seldom_does_so_in_each_kind() -> None:
    """What was seen of its runs of one kind says something of those of another."""
    estimator, told = drive({None: (0.8, 60.0)}), Told(b"a", "asker")
    for _ in range(SEEN_MIN):
        context = estimator.told.context(told)
    for n in range(200):
        kind = FIRST if n % 50 == 0 else KIND
        estimator.change(estimator.open(10**9 + n, kind, 2, 4.0, 2000.0), kind, context)
    estimator.refit(9000.0)
    rows = [row_of(estimator, FIRST, context), FIRST]
    with_it, without = estimator.fitted.worths[rows, 0]
    assert with_it < 0.5 * without


def test_within_a_context_kinds_are_told_apart() -> None:
    """What a kind says is not lost where something is told: a first turn returns seldom here."""
    estimator, random = ReturnEstimator(), Random(1)
    for n in range(1200):
        now, is_later = 3.0 * n, n % 2 == 1
        kind = KIND if is_later else FIRST
        run = estimator.open(n + 1, kind, 1, 4.0, now)
        estimator.change(run, kind, estimator.told.context(QUICK))
        if random.random() < (0.9 if is_later else 0.1):
            estimator.arrive([n + 1], now + 2.0)
        if estimator.is_due:
            estimator.refit(now)
    context = estimator.told.context(QUICK)
    later, first = (row_of(estimator, kind, context) for kind in (KIND, FIRST))
    assert min(later, first) >= NUM_KINDS
    assert estimator.fitted.worths[later, 0] > 3 * estimator.fitted.worths[first, 0]


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
        assert visit.own.context == NOTHING
    assert len(estimator.told) == 0
