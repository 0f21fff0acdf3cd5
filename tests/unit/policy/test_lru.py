# SPDX-License-Identifier: Apache-2.0
"""Lru and Fifo: the oldest goes first, a held one never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.eviction.departures import Departures, departures
from attnstore_vllm.policy.eviction.lru import LOOK_MAX
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import Run, lease_for, unknown_run
from tests.helpers import lru


def fifo(num_slots: int) -> Departures:
    return departures("fifo", num_slots, ReturnEstimator())


def run_now() -> Run:
    return unknown_run(0.0)


def everything(slot: int) -> bool:
    return True


def nothing(slot: int) -> bool:
    return False


def filled(count: int) -> Departures:
    """Each slot by another run."""
    order = lru(count)
    for slot in range(count):
        order.add(slot, run_now())
    return order


def test_an_empty_tier_gives_up_nothing() -> None:
    assert lru(3).victim(0.0, everything) is None


def test_the_least_recently_used_goes_first() -> None:
    policy = filled(3)
    policy.use([0], run_now())
    assert policy.victim(0.0, everything) == 1
    policy.remove(1)
    assert policy.victim(0.0, everything) == 2


def test_choosing_changes_nothing() -> None:
    policy = filled(3)
    assert policy.victim(0.0, everything) == policy.victim(0.0, everything) == 0
    assert len(policy) == 3


def test_held_chunks_never_go() -> None:
    policy = filled(4)
    assert policy.victim(0.0, lambda slot: slot == 2) == 2
    assert policy.victim(0.0, nothing) is None


def test_the_cost_of_a_decision_is_bounded() -> None:
    asked: list[int] = []
    filled(10_000).victim(0.0, lambda slot: asked.append(slot) or False)  # type: ignore[func-returns-value]
    assert len(asked) == LOOK_MAX


def test_an_id_is_added_once() -> None:
    policy = filled(1)
    with pytest.raises(AssertionError):
        policy.add(0, run_now())


@given(st.lists(st.tuples(st.sampled_from("aur"), st.integers(0, 5))))
def test_order_against_a_list(steps: list[tuple[str, int]]) -> None:
    policy, oldest_first = lru(6), list[int]()
    for action, chunk in steps:
        if action == "a" and chunk not in oldest_first:
            policy.add(chunk, run_now())
            oldest_first.append(chunk)
        elif action == "u" and chunk in oldest_first:
            policy.use([chunk], run_now())
            oldest_first.remove(chunk)
            oldest_first.append(chunk)
        elif action == "r" and chunk in oldest_first:
            policy.remove(chunk)
            oldest_first.remove(chunk)
        assert policy.victim(0.0, everything) == (oldest_first[0] if oldest_first else None)


def test_fifo_forgets_use() -> None:
    policy = fifo(3)
    for slot in range(3):
        policy.add(slot, run_now())
    policy.use([0], run_now())
    assert policy.victim(0.0, everything) == 0


def test_of_one_run_the_deepest_goes_first() -> None:
    policy = filled(4)
    policy.use([0, 2, 1], run_now())
    gone = []
    while len(policy):
        gone.append(policy.victim(0.0, everything))
        policy.remove(gone[-1] if gone[-1] is not None else -1)
    assert gone == [3, 1, 2, 0]  # nobody has used 3 since


@pytest.mark.parametrize("make", [lru, fifo])
def test_a_simple_order_keeps_priorities_too(make: Callable[[int], Departures]) -> None:
    order, gone = make(3), []
    for slot, priority in enumerate((1, -1, 0)):
        order.add(slot, replace(run_now(), priority=Priority(priority)))
    while (slot_gone := order.victim(0.0, everything)) is not None:
        gone.append(slot_gone)
        order.remove(slot_gone)
    assert gone == [1, 2, 0]


@pytest.mark.parametrize(("make", "ends"), [(lru, 15.0), (fifo, 10.0)])
def test_a_simple_order_keeps_leases_too(make: Callable[[int], Departures], ends: float) -> None:
    """Under fifo a use renews none: the lease is of all that the run has filled."""
    order = make(2)
    order.add(0, run_now())
    order.add(1, replace(run_now(), lease=lease_for(10.0, 0.0)))
    assert order.victim(9.0, everything) == 0
    order.use([1], replace(run_now(), since=5.0, lease=lease_for(10.0, 5.0)))
    assert order.victim(ends - 1, everything) == 0
    assert order.victim(ends, everything) == 1


@pytest.mark.parametrize("make", [lru, fifo])
def test_what_recovery_found_goes_before_all_others(make: Callable[[int], Departures]) -> None:
    order = make(4)
    order.add(0, run_now())
    order.add_oldest(np.array([3, 1], np.int32), 0.0)
    gone = []
    while (slot := order.victim(0.0, everything)) is not None:
        gone.append(slot)
        order.remove(slot)
    assert gone == [3, 1, 0]


STEP = st.tuples(st.sampled_from(["add", "remove", "use"]), st.integers(0, 7), st.integers(0, 99))


@given(st.lists(STEP, max_size=60))
def test_a_run_gives_up_its_deepest_slot_however_they_came(
    steps: list[tuple[str, int, int]],
) -> None:
    """Slots come to and leave two runs in any order, each time at another depth."""
    policy, runs = lru(8), [unknown_run(0.0), unknown_run(1.0)]
    here, depths = dict[int, Run](), [0] * 8
    policy.depth_of = depths
    for what, slot, depth in steps:
        run = runs[depth % 2]
        if what == "add" and slot not in here:
            here[slot], depths[slot] = run, depth
            policy.add(slot, run)
        elif what == "remove" and slot in here:
            policy.remove(slot)
            del here[slot]
        elif what == "use":
            used = sorted((s for s in here if depths[s] <= depth), key=lambda s: depths[s])
            policy.use(used, run)
            here.update(dict.fromkeys(used, run))
        for run in runs:
            last = [depths[slot] for slot in policy.last_of(run, everything, 3)]
            assert last == sorted((depths[s] for s in here if here[s] is run), reverse=True)[:3]


def test_what_is_over_goes_before_what_is_older() -> None:
    """Its priority has changed since it came."""
    for order in (lru(2), fifo(2)):
        older, newer = unknown_run(0.0), unknown_run(1.0)
        order.add(0, older)
        order.add(1, newer)
        assert order.victim(2.0, everything) == 0
        newer.priority = Priority.ENDED
        order.rank(newer)
        assert order.victim(2.0, everything) == 1
