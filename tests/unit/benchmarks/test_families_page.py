# SPDX-License-Identifier: Apache-2.0
"""docs/models.md is what results/families.json says, and that says of no bug."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.family_models import DRAFTS, FAMILIES
from benchmarks import families
from benchmarks.families import BUGS, left_to_do
from benchmarks.family_parts.table import OUTCOMES, kinds_of, render

ROOT = Path(__file__).parents[3]
FOUND: dict[str, dict[str, Any]] = json.loads((ROOT / "results" / "families.json").read_text())[
    "families"
]


def test_the_page_is_made_of_the_results() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == render(FOUND), "python -m benchmarks.families --docs"


def test_nothing_is_dead_wrong_or_silent() -> None:
    assert {name: r for name, r in FOUND.items() if r["outcome"] in BUGS} == {}


def test_every_outcome_has_a_place_on_the_page() -> None:
    assert {r["outcome"] for r in FOUND.values()} <= OUTCOMES.keys()


def test_every_family_was_tried() -> None:
    assert set(FAMILIES) - set(DRAFTS) <= FOUND.keys()


def test_kinds_of_groups() -> None:
    groups = ["2 SlidingWindowSpec", "2 SlidingWindowSpec", "1 FullAttentionSpec"]
    assert kinds_of(groups) == ["window", "full"]


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is in the file as it comes; those of another commit are found anew."""
    names, tried = ["llama", "gemma3", "gpt_oss"], list[str]()

    def try_family(name: str, _: Path) -> dict[str, Any]:
        tried.append(name)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return dict(FOUND[name])

    monkeypatch.setattr(families, "try_family", try_family)
    monkeypatch.setattr("benchmarks.family_parts.registry.others", tuple)
    monkeypatch.setattr(families, "machine", lambda: {"commit": "c0ffee"})
    file = tmp_path / "families.json"
    file.write_text(json.dumps({"families": {"gpt_oss": {**FOUND["gpt_oss"], "commit": "bad"}}}))
    command = ["--resume", "--json", str(file), "--only", *names]
    with pytest.raises(KeyboardInterrupt):
        families.main(command)
    assert families.main(command) == 0
    assert tried == ["llama", "gemma3", "gemma3", "gpt_oss"]
    assert left_to_do(names, json.loads(file.read_text())["families"], "c0ff") == []
    assert left_to_do(names, {"llama": {"outcome": "served"}}, "c0ffee") == names
