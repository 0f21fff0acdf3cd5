# SPDX-License-Identifier: Apache-2.0
"""One hundred seeds of the simulation; a long run is python -m tests.simulation.run."""

from __future__ import annotations

from attnstore_lab.testing.dict_tier import MakeDictTier
from tests.simulation.run import run


def test_seeds() -> None:
    counts = run(0, 100, 400)
    assert counts["from nvme"] > 500
    assert counts["from dram"] > 500
    for event in (
        "error",
        "flipped bit",
        "lost write",
        "misplaced write",
        "hang",
        "full",
        "power loss",
        "restarts",
        "resets",
    ):
        assert counts[event] > 0, event


def test_seeds_with_a_third_tier() -> None:
    counts = run(1000, 50, 400, tiers=[MakeDictTier(8)])
    assert counts["from nvme"] > 100
    assert counts["from dict"] > 100
