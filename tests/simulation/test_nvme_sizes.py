# SPDX-License-Identifier: Apache-2.0
"""How much less each order of eviction finds with NVMe, of any size and speed, than without."""

from __future__ import annotations

import pytest

from benchmarks.nvme_sizes import MACHINE, conversations, sweep

SIZES, SPEEDS = (0.1, 0.5, 2.0), (0.1, 5.0)
DRAWS = 6
"""What one draw finds may change by some points where DRAM has a slot more."""
LOSS_MAX = 1.0
"""Points, of the mean."""


@pytest.mark.parametrize("policy", ["lru-ahead", "attnstore", "fifo"])
def test_nvme_is_never_worse_than_none(policy: str) -> None:
    draws = [(conversations(30, seed), MACHINE) for seed in range(1, 1 + DRAWS)]
    without, more = sweep(draws, policy, SIZES, SPEEDS)
    assert without > 30
    worst = min(points for row in more.values() for points in row)
    assert worst >= -LOSS_MAX, more
    assert more[5.0][-1] > 5, "a large and quick one is of use"
