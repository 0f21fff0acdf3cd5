# SPDX-License-Identifier: Apache-2.0
"""Who leaves first when the expected return decides."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.eviction.by_return import VICTIMS_MAX
from attnstore_vllm.policy.eviction.departures import (
    GROUPS_MAX,
    SLOTS_MAX,
    Departures,
    departures,
)
from attnstore_vllm.policy.returns import ReturnEstimator, answered, kind_of
from attnstore_vllm.policy.visits import Run, Visit, answer, visit_of

KIND = kind_of(1, None, 1000, is_fresh=True, is_shared=False)


def anything(_: int) -> bool:
    return True


def run_at(since: float, kind: int = KIND) -> Run:
    return Run(1, kind, since, False)


def untrained(num_slots: int = 100) -> Departures:
    return departures("attnstore", num_slots, ReturnEstimator())


def fill(order: Departures, slots: range, run: Run) -> None:
    for slot in slots:
        order.add(slot, run)


def empty(order: Departures, now: float) -> list[int]:
    gone = []
    while len(order):
        slot = order.victim(now, anything)
        assert slot is not None
        gone.append(slot)
        order.remove(slot)
    assert order.victim(now, anything) is None
    return gone


def test_without_knowledge_the_oldest_run_goes_first_and_its_deepest_chunk_before_the_rest() -> (
    None
):
    order = untrained()
    for number, since in enumerate((10.0, 20.0, 40.0)):
        fill(order, range(10 * number, 10 * number + 3), run_at(since))
    assert empty(order, 100.0) == [2, 1, 0, 12, 11, 10, 22, 21, 20]


def test_a_slot_is_of_the_run_that_used_it_last() -> None:
    order = untrained()
    old, new = run_at(0.0), run_at(50.0)
    fill(order, range(3), old)
    order.use([0, 1], new)
    order.add(3, new)
    order.use([0, 1], new)  # said again: its place among the others stays
    assert [order.run_of(slot) for slot in range(5)] == [new, new, old, new, None]
    assert [slot in order for slot in range(5)] == [True, True, True, True, False]
    assert empty(order, 60.0) == [2, 3, 1, 0]


def test_choosing_changes_nothing() -> None:
    order = untrained()
    fill(order, range(3), run_at(0.0))
    assert [order.victim(1.0, anything) for _ in range(3)] == [2, 2, 2]
    assert len(order) == 3


def test_what_is_held_stays_and_the_next_best_goes() -> None:
    order = untrained()
    for number in range(3):
        fill(order, range(10 * number, 10 * number + 2), run_at(float(number)))
    assert order.victim(9.0, lambda slot: slot not in {0, 1, 11}) == 10
    assert order.victim(9.0, lambda slot: slot == 0) == 0
    assert order.victim(9.0, lambda slot: False) is None


def test_the_poorest_is_looked_for_again_before_a_large_group_is_gone() -> None:
    order = untrained()
    fill(order, range(50), run_at(20.0))
    fill(order, range(60, 62), run_at(5.0))
    gone = []
    for number in range(2 * VICTIMS_MAX):
        slot = order.victim(30.0, anything if number else lambda slot: slot < 50)
        assert slot is not None
        gone.append(slot)
        order.remove(slot)
    assert gone[0] == 49
    assert {60, 61} <= set(gone)


def test_the_cost_of_a_decision_is_bounded() -> None:
    order = untrained(20_000)
    for number in range(1000):
        fill(order, range(20 * number, 20 * number + 20), run_at(float(number)))
    asked: list[int] = []
    assert order.victim(2000.0, lambda slot: asked.append(slot) or False) is None  # type: ignore[func-returns-value]
    assert len(asked) <= 2 * GROUPS_MAX * (SLOTS_MAX + 1)


def test_held_runs_at_one_end_do_not_hide_the_others() -> None:
    order = untrained()
    for number in range(GROUPS_MAX + 2):
        order.add(number, run_at(float(number)))
    assert order.victim(99.0, lambda slot: slot != 0) == 1
    newest = GROUPS_MAX + 1
    assert order.victim(99.0, lambda slot: slot == newest) == newest


def test_what_recovery_found_goes_in_its_order_and_can_be_used() -> None:
    order = untrained()
    order.add_oldest(np.array([5, 3, 9], np.int32), 10.0)
    fill(order, range(20, 22), run_at(20.0))
    order.use([3], run_at(30.0))
    order.remove(9)
    assert empty(order, 40.0) == [5, 21, 20, 3]
    order.add_oldest(np.empty(0, np.int32), 10.0)
    assert len(order) == 0


def test_a_slot_is_given_to_what_returns_sooner() -> None:
    order = untrained()
    order.add(1, run_at(50.0))
    assert order.admits(run_at(90.0), 1, 100.0)  # nothing is known, so the younger one
    assert not order.admits(run_at(10.0), 1, 100.0)
    assert order.admits(run_at(10.0), 2, 100.0)  # free


@given(st.lists(st.tuples(st.sampled_from("aurc"), st.integers(0, 9), st.integers(0, 3))))
def test_against_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    order, owner = untrained(10), dict[int, Run]()
    runs = [run_at(float(n)) for n in range(4)]
    for action, slot, number in steps:
        if action == "a" and slot not in owner:
            order.add(slot, runs[number])
            owner[slot] = runs[number]
        elif action == "u" and slot in owner:
            order.use([slot], runs[number])
            owner[slot] = runs[number]
        elif action == "r" and slot in owner:
            order.remove(slot)
            del owner[slot]
        elif action == "c" and slot == number == 0:
            order.clear()
            owner.clear()
        assert len(order) == len(owner)
        assert [order.run_of(s) for s in range(10)] == [owner.get(s) for s in range(10)]
        victim = order.victim(2000.0, anything)
        assert victim in owner if owner else victim is None


def trained() -> ReturnEstimator:
    """Long prompts return after a minute; short ones seldom do."""
    estimator, rng = ReturnEstimator(), Random(1)
    events = []
    for number in range(4000):
        long = number % 2
        events.append((float(number), number, long))
        if rng.random() < (0.9 if long else 0.05):
            events.append((number + rng.uniform(50, 70), number, -1))
    for now, number, long in sorted(events):
        if long < 0:
            estimator.arrive([number], now)
        else:
            kind = kind_of(1, None, 40_000 if long else 100, is_fresh=True, is_shared=False)
            estimator.open(number, kind, 1, 4.0, now)
        if estimator.is_due:
            estimator.refit(now)
    return estimator


def test_a_decision_finds_the_run_that_is_worth_least() -> None:
    """Held against looking at all of them."""
    estimator, rng = trained(), Random(2)
    kinds = [
        kind_of(turn, None, tokens, is_fresh=True, is_shared=False)
        for turn in (1, 2)
        for tokens in (100, 4000, 40_000)
    ]
    order = departures("attnstore", 60, estimator)
    left = {n: run_at(4.0 * n, rng.choice(kinds)) for n in range(60)}
    for slot, run in left.items():
        order.add(slot, run)
    now, worths = 4.0 * 60 + 1, []
    while left:
        gone = order.victim(now, anything)
        assert gone is not None
        worth = {n: estimator.worth(run.kind, now - run.since) for n, run in left.items()}
        # Worth rises with age once and falls once, up to what noise in the estimate makes of it.
        assert worth[gone] <= 1.05 * min(worth.values())
        worths.append(worth[gone])
        order.remove(gone)
        del left[gone]
    assert worths[-1] > 10 * worths[0]


def ask(order: Departures, estimator: ReturnEstimator, chunks: list[int], now: float) -> Visit:
    """A request of whole chunks of 256 tokens, all of which are stored then."""
    last = []
    for chunk in chunks:
        run = order.run_of(chunk)
        if run is None:
            break
        last.append(run)
    visit = visit_of(estimator, last, chunks, 256 * len(chunks), now)
    for number, chunk in enumerate(chunks):
        if chunk in order:
            order.use([chunk], visit.run(number))
        else:
            order.add(chunk, visit.run(number))
    return visit


def returns_after_long_answers() -> ReturnEstimator:
    estimator = ReturnEstimator()
    for end in range(1000):
        now, is_long = float(end), end % 2 == 0
        kind = answered(KIND, 600 if is_long else 20)
        estimator.open(end, kind, 1, 4.0, now)
        if is_long:
            estimator.arrive([end], now + 30.0)
    estimator.refit(1030.0)
    return estimator


def test_what_an_answer_tells_counts_at_once() -> None:
    """Also for a run in the middle of its lane, of which a decision looks at the ends."""
    estimator = returns_after_long_answers()
    order = departures("attnstore", 100, estimator)
    runs = [run_at(1030.0 + number) for number in range(40)]
    for number, run in enumerate(runs):
        answer(run, 600, estimator, 0.0)
        order.add(number, run)
    answer(runs[20], 20, estimator, 0.0)
    order.rank(runs[20])
    assert order.victim(1080.0, anything) == 20
    order.remove(20)
    order.rank(runs[20])  # it has no slot any more
    assert len(empty(order, 1080.0)) == 39


def test_what_others_share_has_no_answer() -> None:
    estimator = returns_after_long_answers()
    run = Run(estimator.open(9999, KIND, 0, 4.0, 1030.0), KIND, 1030.0, True)
    answer(run, 600, estimator, 0.0)
    assert run.kind == KIND


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_by_age_an_answer_changes_nothing(policy: str) -> None:
    order = departures(policy, 10, ReturnEstimator())
    runs = [run_at(float(number)) for number in range(3)]
    for number, run in enumerate(runs):
        order.add(number, run)
    answer(runs[0], 600, ReturnEstimator(), 0.0)
    order.rank(runs[0])
    assert empty(order, 10.0) == [0, 1, 2]


def test_what_conversations_share_is_told_from_what_is_their_own() -> None:
    estimator = ReturnEstimator()
    order = departures("attnstore", 100, estimator)
    assert ask(order, estimator, [0, 1, 2], 0.0).num_shared == 0
    visit = ask(order, estimator, [0, 1, 12, 13], 10.0)  # another one, same beginning
    assert visit.num_shared == 2
    assert (visit.run(1).is_shared, visit.run(2).is_shared) == (True, False)
    visit = ask(order, estimator, [0, 1, 2, 3], 20.0)  # the first one's next turn
    assert visit.num_shared == 2
    assert visit.own.kind == kind_of(2, 20.0, 1024, is_fresh=False, is_shared=False)


def test_a_conversation_alone_shares_nothing() -> None:
    estimator = ReturnEstimator()
    order = departures("attnstore", 100, estimator)
    for turn in range(1, 6):
        visit = ask(order, estimator, list(range(2 * turn)), 30.0 * turn)
        assert visit.num_shared == 0
    assert visit.own.kind == kind_of(5, 30.0, 2560, is_fresh=False, is_shared=False)


def test_a_conversation_without_end() -> None:
    """Also the same prompt again and again, as a health probe sends it."""
    estimator = ReturnEstimator()
    order = departures("attnstore", 10, estimator)
    for second in range(33_000):
        visit = ask(order, estimator, [0, 1], float(second))
    assert visit.own.kind == kind_of(4, 1.0, 512, is_fresh=False, is_shared=False)
    assert len(estimator) == 1


def test_what_has_left_a_group_takes_no_room_in_it() -> None:
    order, run = untrained(), run_at(0.0)
    order.add(0, run)
    for _ in range(1000):
        order.add(1, run)
        order.remove(1)
    (group,) = order.groups.values()
    assert len(group.slots) < 50
    assert empty(order, 1.0) == [0]


def test_turns_are_counted_also_if_nothing_is_stored_any_more() -> None:
    estimator = ReturnEstimator()
    ask(departures("attnstore", 100, estimator), estimator, [0, 1], 0.0)
    visit = ask(departures("attnstore", 100, estimator), estimator, [0, 1, 2], 20.0)
    assert visit.own.kind == kind_of(2, 20.0, 768, is_fresh=False, is_shared=False)


@pytest.mark.parametrize("known", [0, 1])
def test_a_request_without_a_whole_chunk_is_followed_by_nobody(known: int) -> None:
    estimator = ReturnEstimator()
    visit = visit_of(estimator, [run_at(0.0)] * known, [], 100, 1.0)
    assert visit.run(0) in (visit.own, visit.shared)
    assert len(estimator) == 0
