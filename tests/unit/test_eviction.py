# SPDX-License-Identifier: Apache-2.0
"""Lru: the oldest goes first, one that costs nothing before it, a held one never."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.eviction import LOOK_MAX, EvictionPolicy, Lru


def everything(chunk: Hashable) -> bool:
    return True


def nothing(chunk: Hashable) -> bool:
    return False


def filled(count: int) -> Lru:
    policy = Lru()
    for chunk in range(count):
        policy.add(chunk)
    return policy


def test_it_is_an_eviction_policy() -> None:
    policy: EvictionPolicy = Lru()
    assert policy.victim(everything, everything) is None


def test_the_least_recently_used_goes_first() -> None:
    policy = filled(3)
    policy.use(0)
    assert policy.victim(everything, everything) == 1
    policy.remove(1)
    assert policy.victim(everything, everything) == 2


def test_choosing_changes_nothing() -> None:
    policy = filled(3)
    assert policy.victim(everything, nothing) == policy.victim(everything, nothing) == 0
    assert len(policy) == 3


def test_one_that_another_tier_has_goes_before_older_ones() -> None:
    assert filled(5).victim(everything, lambda chunk: chunk == 3) == 3


def test_one_that_costs_nothing_is_looked_for_among_the_oldest_only() -> None:
    policy = filled(LOOK_MAX + 1)
    assert policy.victim(everything, lambda chunk: chunk == LOOK_MAX - 1) == LOOK_MAX - 1
    assert policy.victim(everything, lambda chunk: chunk == LOOK_MAX) == 0


def test_held_chunks_never_go() -> None:
    policy = filled(4)
    assert policy.victim(lambda chunk: chunk == 2, nothing) == 2
    assert policy.victim(lambda chunk: chunk == 2, lambda chunk: chunk == 0) == 2
    assert policy.victim(nothing, everything) is None


def test_the_cost_of_a_decision_is_bounded() -> None:
    asked: list[Hashable] = []
    filled(10_000).victim(everything, lambda chunk: asked.append(chunk) or False)  # type: ignore[func-returns-value]
    assert len(asked) == LOOK_MAX


def test_an_id_is_added_once() -> None:
    policy = filled(1)
    with pytest.raises(AssertionError):
        policy.add(0)


@given(st.lists(st.tuples(st.sampled_from("aur"), st.integers(0, 5))))
def test_order_against_a_list(steps: list[tuple[str, int]]) -> None:
    policy, oldest_first = Lru(), list[int]()
    for action, chunk in steps:
        if action == "a" and chunk not in oldest_first:
            policy.add(chunk)
            oldest_first.append(chunk)
        elif action == "u" and chunk in oldest_first:
            policy.use(chunk)
            oldest_first.remove(chunk)
            oldest_first.append(chunk)
        elif action == "r" and chunk in oldest_first:
            policy.remove(chunk)
            oldest_first.remove(chunk)
        assert policy.victim(everything, nothing) == (oldest_first[0] if oldest_first else None)
