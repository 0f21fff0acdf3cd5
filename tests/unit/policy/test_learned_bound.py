# SPDX-License-Identifier: Apache-2.0
"""Bounds that are learned from rounding: never wider than the usual one, and slow to trust."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.kv_compare import BOUND
from attnstore_vllm.policy.learned_bound import (
    FACTOR,
    LEAST,
    PAIRS,
    LearnedBound,
    as_json,
    bounds_from,
)


def learned(distances: Iterable[float]) -> LearnedBound:
    bound = LearnedBound()
    for distance in distances:
        bound = bound.and_one(distance)
    return bound


@pytest.mark.parametrize(
    ("seen", "value"),
    [
        ([0.0] * (PAIRS - 1), BOUND),
        ([0.0] * PAIRS, LEAST),
        ([0.01] * PAIRS, LEAST),
        ([*[0.0] * PAIRS, 0.02], 0.2),
        ([*[0.0] * PAIRS, 0.026], 0.25),
        ([*[0.0] * PAIRS, 0.2], BOUND),
    ],
)
def test_the_bound(seen: list[float], value: float) -> None:
    assert learned(seen).value == pytest.approx(value)


@given(st.lists(st.floats(0.0, BOUND), max_size=100))
def test_what_was_seen_is_far_within_it(distances: list[float]) -> None:
    bound = learned(distances)
    assert LEAST <= bound.value <= BOUND
    assert all(FACTOR * one <= bound.value + 1e-6 or bound.value == BOUND for one in distances)


@given(st.lists(st.lists(st.floats(0.0, BOUND), max_size=40), min_size=1, max_size=4))
def test_it_is_read_as_it_was_written(groups: list[list[float]]) -> None:
    bounds = [learned(group) for group in groups]
    assert bounds_from(json.loads(json.dumps(as_json(bounds))), len(bounds)) == bounds


@pytest.mark.parametrize(
    "found",
    [
        None, 7, {}, [], [[40, 0.0]], [[40, 0.0], [40, -0.1]], [[40, 0.0], [40, 0.6]],
        [[40, 0.0], [-1, 0.0]], [[40, 0.0], [10**5000, 0.0]], [[40, 0.0], [40, nan]],
        [[40, 0.0], [40, inf]], [[40, 0.0], "40"],
        [[40, 0.0], [40, 0.0, 1]], [[40, 0.0], [40.5, 0.0]], [[40, 0.0], [40, "0"]],
    ],
)  # fmt: skip
def test_anything_else_tells_nothing(found: object) -> None:
    assert bounds_from(found, 2) == [LearnedBound()] * 2
