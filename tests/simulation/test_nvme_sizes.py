# SPDX-License-Identifier: Apache-2.0
"""How much less each order of eviction finds with NVMe, of any size and speed, than without."""

from __future__ import annotations

import pytest

from benchmarks.nvme_sizes import conversations, sweep

SIZES, SPEEDS = (0.1, 0.5, 2.0), (0.1, 1.0, 5.0)
LOSS_MAX = {"lru-ahead": 1.0, "attnstore": 5.0, "fifo": 5.0}
"""Points. The goal is 1.0 for all. attnstore and fifo do not meet it, and why is not known:
docs/faults.md. What holds them here is that they get no worse."""


@pytest.mark.parametrize("policy", LOSS_MAX)
def test_nvme_is_never_worse_than_none(policy: str) -> None:
    without, more = sweep(conversations(30), policy, SIZES, SPEEDS)
    assert without > 30
    worst = min(points for row in more.values() for points in row)
    assert worst >= -LOSS_MAX[policy], more
    assert more[5.0][-1] > 5, "a large and quick one is of use"
