# SPDX-License-Identifier: Apache-2.0
"""Sessions end by their id: with those that they have begun, within one tenant, within limits."""

from __future__ import annotations

import pytest

from attnstore_vllm.policy import sessions
from attnstore_vllm.policy.returns import ReturnEstimator, kind_of
from attnstore_vllm.policy.sessions import CHILDREN_MAX, ENDED_MAX, RUNS_MAX, SessionTable
from attnstore_vllm.policy.visits import Run, Terms, unknown_run, visit_of


def runs(count: int) -> list[Run]:
    return [unknown_run(float(n)) for n in range(count)]


def test_a_session_ends_once_with_its_last_runs() -> None:
    table, left = SessionTable(), runs(RUNS_MAX + 2)
    for run in left:
        table.note(b"t", "a", run)
    other = unknown_run(0.0)
    table.note(b"t", "b", other)
    assert table.end(b"t", "a") == left[2:]
    assert table.end(b"t", "a") == []
    assert table.end(b"t", "b") == [other]


def test_the_numbers_of_its_last_runs_are_told_until_it_ends() -> None:
    table, estimator = SessionTable(), ReturnEstimator()
    left = [visit_of(estimator, [], [n], 256, float(n)).own for n in range(RUNS_MAX + 1)]
    for run in left:
        table.note(b"t", "a", run)
    assert table.numbers(b"t", "a") == {run.number for run in left[1:]}
    assert table.numbers(b"u", "a") == table.numbers(b"t", "b") == frozenset()
    assert len(table) == 1, "to ask makes none"
    table.end(b"t", "a")
    assert table.numbers(b"t", "a") == frozenset()


def test_another_tenants_session_is_another() -> None:
    table, (one, other) = SessionTable(), runs(2)
    table.note(b"t", "a", one)
    table.note(b"u", "child", other, "a")
    assert table.end(b"u", "a") == [other]
    assert table.end(b"t", "a") == [one]


def test_children_end_with_their_parent_and_not_it_with_them() -> None:
    table, (parent, child, grandchild) = SessionTable(), runs(3)
    table.note(b"t", "c", grandchild, "b")
    table.note(b"t", "b", child, "a")
    table.note(b"t", "a", parent)
    assert table.end(b"t", "c") == [grandchild]
    table.note(b"t", "c", grandchild, "b")
    assert table.end(b"t", "a") == [parent, child, grandchild]
    assert len(table) == 0


def test_two_that_have_begun_each_other_end_too() -> None:
    table, (one, other) = SessionTable(), runs(2)
    table.note(b"t", "a", one, "b")
    table.note(b"t", "b", other, "a")
    table.note(b"t", "a", one, "a")
    assert set(table.end(b"t", "a")) == {one, other}
    assert len(table) == 0


def test_no_client_makes_it_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 1000)
    table, (run,) = SessionTable(), runs(1)
    for n in range(3000):
        table.note(b"t", f"s{n}", run, f"p{n}")
    assert len(table) == 1000
    for n in range(3 * CHILDREN_MAX):
        table.note(b"t", f"c{n}", unknown_run(0.0), "a")
    assert len(table.end(b"t", "a")) == CHILDREN_MAX
    for n in range(RUNS_MAX * 40):
        for m in range(RUNS_MAX):
            table.note(b"t", f"d{n}", unknown_run(float(m)), f"d{n - 1}")
    assert len(table.end(b"t", "d-1")) == ENDED_MAX


def test_the_last_turn_is_told_until_it_ends() -> None:
    table = SessionTable()
    assert table.last_turn(b"t", "s") is None
    for number, since in ((1, 5.0), (2, 65.0)):
        table.note(b"t", "s", unknown_run(since))
        assert table.last_turn(b"t", "s") == (number, since)
    assert table.last_turn(b"u", "s") is None
    table.note(b"t", "child", unknown_run(70.0), parent="s")
    assert table.last_turn(b"t", "s") == (2, 65.0)
    table.end(b"t", "s")
    assert table.last_turn(b"t", "s") is None


def test_a_parent_that_has_asked_nothing_has_no_turn() -> None:
    table = SessionTable()
    table.note(b"t", "child", unknown_run(70.0), parent="s")
    assert table.last_turn(b"t", "s") is None


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_sessions_name_says_how_long_it_was_away(is_named: bool, is_edited: bool) -> None:
    """Also where its prompt was edited, so that it does not go on from the one before it."""
    estimator, table = ReturnEstimator(), SessionTable()
    for number, now in enumerate((0.0, 100.0, 200.0)):
        first = 10 * number if is_edited else 0
        last = table.last_turn(b"t", "s") if is_named else None
        marks = [*range(first + 1, first + 2 + number)]
        visit = visit_of(estimator, [], marks, 1000, now, Terms(last_turn=last))
        table.note(b"t", "s", visit.own)
    turn, gap_s = (3, 100.0) if is_named or not is_edited else (1, None)
    assert visit.own.kind == kind_of(turn, gap_s, 1000, is_fresh=is_edited, is_shared=False)
