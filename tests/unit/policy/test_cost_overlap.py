# SPDX-License-Identifier: Apache-2.0
"""Layers before the start, against a forward pass that is run layer by layer."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnstore_vllm.policy.cost import (
    LOADS_MIN,
    OUTLIER,
    LoadRate,
    default_write_buffer_bytes,
    layers_before,
)


def waited(load_s: float, compute_s: float, num_layers: int, before: int) -> Fraction:
    """Seconds that a forward pass waits for layers, started with so many of them in HBM."""
    arrival, compute = Fraction(load_s) / num_layers, Fraction(compute_s) / num_layers
    now, total = before * arrival, Fraction(0)
    for layer in range(num_layers):
        wait = max(Fraction(0), (layer + 1) * arrival - now)
        total += wait
        now += wait + compute
    return total


TIMES = st.one_of(
    st.floats(1e-9, 1e3),
    st.integers(1, 64).map(float),  # quotients that are whole numbers
)


@given(load_s=TIMES, compute_s=TIMES, num_layers=st.integers(1, 100))
@example(load_s=3.0, compute_s=1.0, num_layers=4)
@example(load_s=0.3, compute_s=0.1, num_layers=4)
@example(load_s=1.1, compute_s=1.1, num_layers=2)
def test_as_few_layers_as_make_nothing_wait(
    load_s: float, compute_s: float, num_layers: int
) -> None:
    before = layers_before(load_s, compute_s, num_layers)
    assert 0 <= before <= num_layers
    assert before != 1, "one layer is hidden by nothing, so it is loaded in the step"
    if before == 0:
        assert waited(load_s, compute_s, num_layers, 1) == 0
    else:
        assert waited(load_s, compute_s, num_layers, before) == 0
        assert waited(load_s, compute_s, num_layers, before - 1) > 0


def test_a_load_three_times_as_long_as_the_prefill() -> None:
    assert layers_before(3.0, 1.0, 24) == 17  # 24 - floor(23 / 3)
    assert layers_before(1.0, 1.0, 24) == 0
    assert layers_before(1.0 + 1e-12, 1.0, 24) == 2
    assert layers_before(1.0, 2.0, 24) == 0


def test_no_layer_too_few_where_the_quotient_of_floats_is_rounded_up() -> None:
    rng, rounded = Random(1), 0
    for _ in range(2000):
        compute_s, num_layers = rng.random(), rng.randrange(2, 100)
        load_s = (num_layers - 1) * compute_s / rng.randrange(1, num_layers)
        before = layers_before(load_s, compute_s, num_layers)
        assert waited(load_s, compute_s, num_layers, max(before, 1)) == 0
        rounded += num_layers - before != math.floor((num_layers - 1) * compute_s / load_s)
    assert rounded > 10, "the loop does not reach the quotients that it is for"


@pytest.mark.parametrize(
    ("load_s", "compute_s", "num_layers", "expected"),
    [
        (0.0, 0.0, 8, 0),
        (0.0, 1.0, 8, 0),
        (-1e-9, 1.0, 8, 0),
        (1.0, 0.0, 8, 8),
        (1.0, -1e-9, 8, 8),
        (-1.0, -2.0, 8, 0),
        (5.0, 1.0, 1, 0),
        (5.0, 1.0, 0, 0),
        (math.inf, 1.0, 8, 8),
        (1.0, math.inf, 8, 0),
        (math.inf, math.inf, 8, 8),
        (math.nan, 1.0, 8, 8),
        (1.0, math.nan, 8, 8),
        (math.nan, math.nan, 8, 8),
        (-math.inf, 1.0, 8, 0),
        (1.0, -math.inf, 8, 8),
        (5e-324, 1e308, 8, 0),
        (1e308, 5e-324, 8, 8),
    ],
)
def test_degenerate_times(load_s: float, compute_s: float, num_layers: int, expected: int) -> None:
    assert layers_before(load_s, compute_s, num_layers) == expected


# ---- how fast loads are -------------------------------------------------------------------

GIB = 1 << 30


def test_nothing_is_said_before_enough_loads_were_seen() -> None:
    rate = LoadRate()
    assert rate.seconds(GIB) == 0.0
    for _ in range(LOADS_MIN):
        assert not rate.is_known
        rate.observe(GIB, 0.1)
    assert rate.is_known
    assert rate.seconds(4 * GIB) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, math.inf),
                               (1, math.nan)],
)  # fmt: skip
def test_what_says_nothing_is_not_counted(num_bytes: int, seconds: float) -> None:
    rate = LoadRate()
    for _ in range(2 * LOADS_MIN):
        rate.observe(num_bytes, seconds)
    assert not rate.is_known


def test_it_is_the_mean() -> None:
    rate = LoadRate()
    for number in range(400):
        rate.observe(GIB, 0.08 if number % 2 else 0.12)
    assert rate.seconds(GIB) == pytest.approx(0.10, rel=0.02)


def test_a_large_load_counts_for_more_than_a_small_one() -> None:
    """100 MB/s while 4 KiB are copied says how long a copy takes to begin."""
    rate = LoadRate()
    for _ in range(100):
        rate.observe(GIB, 0.1)
        rate.observe(4096, 4096 / 100e6)
    assert rate.seconds(GIB) == pytest.approx(0.1, rel=0.02)


def test_a_change_of_speed_is_learned_and_a_stopped_process_is_not() -> None:
    rate = LoadRate()
    for _ in range(200):
        rate.observe(GIB, 0.1)
    rate.observe(GIB, 60.0)
    assert rate.seconds(GIB) < 0.1 * (1 + OUTLIER / 4)
    for _ in range(400):
        rate.observe(GIB, 0.1)
    assert rate.seconds(GIB) == pytest.approx(0.1, rel=0.05)
    for slower in (0.3, 3.0):
        for _ in range(800):
            rate.observe(GIB, slower)
        assert rate.seconds(GIB) == pytest.approx(slower, rel=0.05)


# ---- the write buffer ---------------------------------------------------------------------


def test_the_write_buffer_holds_two_steps_in_whole_chunks() -> None:
    token, chunk = 131_072, 256 * 131_072
    assert default_write_buffer_bytes(token, 8192, chunk, 1 << 40) == 64 * chunk
    assert default_write_buffer_bytes(token, 8200, chunk, 1 << 40) == 64 * chunk
    assert default_write_buffer_bytes(token, 8192, chunk, 50 * 32 * chunk) == 32 * chunk
    assert default_write_buffer_bytes(token, 8192, chunk, 50 * 32 * chunk - 50) == 31 * chunk
    for device_bytes in (0, 1 << 20):
        assert default_write_buffer_bytes(token, 8192, chunk, device_bytes) == chunk
    assert default_write_buffer_bytes(token, 16, chunk, 1 << 40) == chunk
