# SPDX-License-Identifier: Apache-2.0
"""What tells wrong KV from rounding: the comparison of answers."""

from __future__ import annotations

import math

import pytest

from benchmarks.rounding import drift
from tests.vllm.engine import Answer

BEST = ((1, -0.1), (2, -4.0), (3, -4.5), (4, -5.0), (5, -5.2))


def one(*candidates: tuple[int, float], token: int = 1) -> Answer:
    return Answer((token,), (candidates,), 0)


def test_a_candidate_that_only_one_names() -> None:
    swapped = one(*BEST[:-1], (6, -5.19))
    assert drift(one(*BEST), swapped) == pytest.approx(0.01)
    assert drift(one(*BEST[:-1], (6, -4.2)), one(*BEST)) == pytest.approx(1.0)


def test_an_unlikely_token_that_was_drawn_bounds_nothing() -> None:
    drawn = (9, -11.0)
    here, there = one(*BEST, drawn, token=9), one(*BEST[:-1], (6, -5.19), drawn, token=9)
    assert drift(here, there) == pytest.approx(0.01)
    assert drift(here, one(*BEST, (9, -9.5), token=9)) == pytest.approx(1.5)


def test_no_number_is_never_rounding() -> None:
    assert drift(one((1, math.nan)), one(*BEST)) == math.inf
