# SPDX-License-Identifier: Apache-2.0
"""No order of eviction finds less with NVMe, of any size and speed, than without."""

from __future__ import annotations

import pytest

from benchmarks.nvme_sizes import conversations, sweep

SIZES, SPEEDS = (0.1, 0.5, 2.0), (0.1, 1.0, 5.0)
NOISE = {"lru-ahead": 1.0, "attnstore": 5.0, "fifo": 5.0}
"""Points. What is found is a matter of which conversations a step meets: with other seeds, and no
fault, that of attnstore, which learns, and of fifo is up to so many points more or less."""


@pytest.mark.parametrize("policy", NOISE)
def test_nvme_is_never_worse_than_none(policy: str) -> None:
    without, more = sweep(conversations(30), policy, SIZES, SPEEDS)
    assert without > 30
    worst = min(points for row in more.values() for points in row)
    assert worst >= -NOISE[policy], more
    assert more[5.0][-1] > 5, "a large and quick one is of use"
