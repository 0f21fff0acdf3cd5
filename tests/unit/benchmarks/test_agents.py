# SPDX-License-Identifier: Apache-2.0
"""benchmarks.agents: a tier of ours that is worse than none fails it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from attnstore_lab.sim.outcome import Outcome
from benchmarks import agents

ARMS = ("LRU 16 GB", "attnstore 16 GB", "attnstore 16 GB + NVMe", "holding, no tier")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, slower: str = "") -> None:
    """The benchmark with runs of one job each, in which the named arm takes twice as long."""
    ran = agents.ran

    def slowed(load, rate, arm, seed, num_jobs):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        outcome: Outcome = ran(load, rate, arm, seed, num_jobs)
        if arm.name == slower:
            outcome.sessions = {s: (b, 2 * e - b) for s, (b, e) in outcome.sessions.items()}
        return outcome

    monkeypatch.setattr(agents, "ran", slowed)
    monkeypatch.setattr(agents, "RATES", (3,))
    monkeypatch.setattr(agents, "DRAWN_RATES", (3,))
    monkeypatch.setattr(agents, "ARMS", [arm for arm in agents.ARMS if arm.name in ARMS])
    command = ["agents", "--simulated", "--jobs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    agents.main()


def test_published_arms_are_beside_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["published"]["18 turns"]["3"]["LMCache 16 GB"] == 260.6
    assert len(found["matrix"]) == (1 + 2) * (1 + len(ARMS))
    assert found["worse_than_none"] == 0
    said = capsys.readouterr().out
    assert "LMCache 16 GB                  260.6 s   1.12" in said
    assert "attnstore 16 GB + NVMe" in said


@pytest.mark.parametrize("arm", ["attnstore 16 GB", "holding, no tier"])
def test_a_tier_that_is_worse_than_none_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arm: str
) -> None:
    with pytest.raises(SystemExit, match="worse than none"):
        run(monkeypatch, tmp_path / "found.json", slower=arm)


def test_others_may_be_worse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path / "found.json", slower="LRU 16 GB")
