# SPDX-License-Identifier: Apache-2.0
"""The figures of `benchmarks.overlap --only throughput`, of steps that are given."""

from __future__ import annotations

import pytest

from benchmarks.overlap_parts.throughput import StepTimes, interval, summary


def test_a_cost_in_every_round_is_seen_and_one_slow_moment_is_not() -> None:
    usual = [StepTimes(0.4, 0.41, 0.005), StepTimes(0.04, 0.041, 0.0)]
    slow = [StepTimes(0.4, 0.8, 0.005), StepTimes(0.04, 0.041, 0.0)]
    found = summary([usual, slow, usual])
    assert found["ratio"] == found["ratio_of_steps"] == pytest.approx(0.44 / 0.456, abs=0.001)
    assert found["ratio_of_all"] == pytest.approx(1.32 / 1.758, abs=0.001)
    assert found["step_ms"] == {"plain": [400.0, 40.0], "cost": [15.0, 1.0]}
    assert found["round_ms"][1] == [440.0, 841.0, 5.0]
    assert found["ratio_of_rounds"]["rounds"] == found["rounds"] == 3


def test_what_follows_a_step_counts() -> None:
    found = summary([[StepTimes(1.0, 1.0, 0.25)]] * 2)
    assert found["ratio"] == found["ratio_of_all"] == 0.8


def test_a_cost_that_comes_in_another_step_each_time_is_in_the_ratio() -> None:
    plain, slow = StepTimes(0.1, 0.1, 0.0), StepTimes(0.1, 0.15, 0.0)
    found = summary([[slow if n == number else plain for n in range(5)] for number in range(5)])
    assert found["ratio"] == pytest.approx(0.5 / 0.55, abs=0.001)
    assert found["ratio_of_steps"] == 1.0, "which is why it is not the ratio"


def test_the_interval_of_a_median() -> None:
    # Of 40 values the 14th and the 27th: the median is outside in 3.8 of 100 cases.
    assert interval(range(1, 41)) == [14, 27]
    assert interval([3.0]) == [3.0, 3.0]
    assert interval([1.0, 2.0, 3.0]) == [1.0, 3.0]
