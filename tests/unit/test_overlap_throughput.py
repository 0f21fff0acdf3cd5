# SPDX-License-Identifier: Apache-2.0
"""The figures of `benchmarks.overlap --only throughput`, of steps that are given."""

from __future__ import annotations

import pytest

from benchmarks.overlap_parts.throughput import StepTimes, summary


def test_a_cost_in_every_round_is_seen_and_one_slow_moment_is_not() -> None:
    usual = [StepTimes(0.4, 0.41, 0.005), StepTimes(0.04, 0.041, 0.0)]
    slow = [StepTimes(0.4, 0.8, 0.005), StepTimes(0.04, 0.041, 0.0)]
    found = summary([usual, slow, usual])
    assert found["ratio"] == pytest.approx(0.44 / 0.456, abs=0.001)
    assert found["ratio_of_all"] == pytest.approx(1.32 / 1.758, abs=0.001)
    assert found["step_ms"] == {"plain": [400.0, 40.0], "cost": [15.0, 1.0]}
    assert found["ratio_of_rounds"]["rounds"] == found["rounds"] == 3


def test_what_follows_a_step_counts() -> None:
    found = summary([[StepTimes(1.0, 1.0, 0.25)]] * 2)
    assert found["ratio"] == found["ratio_of_all"] == 0.8
