# SPDX-License-Identifier: Apache-2.0
"""Lru and Fifo: the oldest goes first, a held one never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.eviction import LOOK_MAX, EvictionPolicy, Fifo, Lru
from attnstore_vllm.policy.returns import unknown_run

RUN = unknown_run(0.0)


def everything(slot: int) -> bool:
    return True


def nothing(slot: int) -> bool:
    return False


def filled(count: int) -> Lru:
    policy = Lru(count)
    for slot in range(count):
        policy.add(slot, RUN)
    return policy


def test_it_is_an_eviction_policy() -> None:
    policy: EvictionPolicy = Lru(3)
    assert policy.victim(0.0, everything) is None


def test_the_least_recently_used_goes_first() -> None:
    policy = filled(3)
    policy.use([0], RUN)
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
        policy.add(0, RUN)


@given(st.lists(st.tuples(st.sampled_from("aur"), st.integers(0, 5))))
def test_order_against_a_list(steps: list[tuple[str, int]]) -> None:
    policy, oldest_first = Lru(6), list[int]()
    for action, chunk in steps:
        if action == "a" and chunk not in oldest_first:
            policy.add(chunk, RUN)
            oldest_first.append(chunk)
        elif action == "u" and chunk in oldest_first:
            policy.use([chunk], RUN)
            oldest_first.remove(chunk)
            oldest_first.append(chunk)
        elif action == "r" and chunk in oldest_first:
            policy.remove(chunk)
            oldest_first.remove(chunk)
        assert policy.victim(0.0, everything) == (oldest_first[0] if oldest_first else None)


def test_fifo_forgets_use() -> None:
    policy = Fifo(3)
    for slot in range(3):
        policy.add(slot, RUN)
    policy.use([0], RUN)
    assert policy.victim(0.0, everything) == 0


def test_of_one_run_the_deepest_goes_first() -> None:
    policy = filled(4)
    policy.use([0, 2, 1], RUN)
    gone = []
    while len(policy):
        gone.append(policy.victim(0.0, everything))
        policy.remove(gone[-1] if gone[-1] is not None else -1)
    assert gone == [3, 1, 2, 0]
