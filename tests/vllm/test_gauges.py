# SPDX-License-Identifier: Apache-2.0
"""Gauges come by steps and, while the engine sleeps, by a board: the newest one is shown.

The board is read once a second. What it said before a step must not be shown after that step: a
gauge that then stays as it is would be wrong until it changes again.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from attnstore_vllm.connector.metrics import AttnStorePromMetrics, AttnStoreStats
from attnstore_vllm.scheduler.figures import StepStats

GAUGE = "nvme_in_use"


def data_of(value: float, looked_at: float) -> dict[str, Any]:
    stats = StepStats()
    stats.set(GAUGE, "reads", value, looked_at)
    return stats.data


@pytest.fixture(scope="module")
def metrics() -> AttnStorePromMetrics:
    """One for all tests: a process can register each name once."""
    return AttnStorePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["engine"],
        {0: ["of this test"], 1: ["another of it"]},
    )


def test_a_gauge_of_before_is_not_shown_after_a_newer_one(metrics: AttnStorePromMetrics) -> None:
    by_board, by_step = data_of(0.0, looked_at=1.0), data_of(1.0, looked_at=2.0)
    metrics.observe(by_step, 0)
    metrics.observe(by_board, 0)
    metrics.observe(by_board, 1)
    assert shown("of this test") == 1.0
    assert shown("another of it") == 0.0
    metrics.observe(data_of(0.0, looked_at=3.0), 0)
    assert shown("of this test") == 0.0


def test_of_several_steps_the_last_is_shown() -> None:
    both = AttnStoreStats(data=data_of(0.0, 1.0)).aggregate(AttnStoreStats(data=data_of(1.0, 2.0)))
    assert both.data["gauges"][f"{GAUGE}:reads"] == [2.0, 1.0]


def test_figures_without_a_metric_are_left_out_with_one_warning_each(
    metrics: AttnStorePromMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    stats = StepStats()
    stats.set("tape_in_use", "reads", 1.0, 10.0)  # as a tier that somebody adds has it
    stats.set("info", "of|too few", 1.0, 10.0)
    stats.add("tape_loads", "reads", 1)
    stats.observe("tape_seconds", 0.1)
    stats.set(GAUGE, "reads", 0.5, 10.0)
    with caplog.at_level(logging.WARNING, "attnstore_vllm"):
        metrics.observe(stats.data, 0)
        metrics.observe(stats.data, 0)
    assert shown("of this test") == 0.5, "the others are shown"
    said = [record.getMessage() for record in caplog.records]
    names = ("tape_loads", "tape_in_use", "info", "tape_seconds")
    assert [line.partition(" ")[0] for line in said] == list(names)
    assert "has no metric in AttnStore" in said[0]
    given, wanted = "(of, too few)", "(version, vllm, io, eviction)"
    assert f"with label values {given}, its metric in AttnStore wants {wanted}" in said[2]


def shown(engine: str) -> float | None:
    labels = {"engine": engine, "direction": "reads"}
    return REGISTRY.get_sample_value(f"vllm:attnstore_{GAUGE}", labels)
