# SPDX-License-Identifier: Apache-2.0
"""benchmarks.gpu_e2e on the CPU build: for long runs, and before a GPU is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.long, pytest.mark.timeout(3_000)]


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the rows by name."""
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_e2e", "--cpu", "--out", str(out), *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        timeout=2_900,
        check=False,
    )
    return done.returncode, {row["name"]: row for row in json.loads(out.read_text())["cases"]}


def test_every_case_that_the_cpu_build_has_is_right(tmp_path: Path) -> None:
    code, rows = run(tmp_path)
    assert code == 0, {name: row["why"] for name, row in rows.items()}
    right = {name for name, row in rows.items() if row["outcome"] == "ok"}
    assert right >= {"eager", "default", "fp8", "block-64", "hits", "throughput"}


def test_one_wrong_bit_in_each_load_is_seen(tmp_path: Path) -> None:
    code, rows = run(tmp_path, "--only", "eager", "--wrong-bytes")
    assert code == 1
    phases = rows["eager"]["phases"]
    assert phases["computed"]["wrong"] == 0
    assert phases["dram"]["wrong"] > 0 and phases["nvme"]["wrong"] > 0
    assert "nats; rounding is up to" in rows["eager"]["why"]


def test_the_quick_form_runs_on_the_cpu_build(tmp_path: Path) -> None:
    code, rows = run(tmp_path, "--quick", "--budget", "1500")
    assert code == 0, {name: (row["outcome"], row["why"]) for name, row in rows.items()}
    right = {name for name, row in rows.items() if row["outcome"] == "ok"}
    assert right >= {"starts", "answers eager", "hits attnstore", "throughput", "nvme eager"}
    assert all(row["why"] for row in rows.values() if row["outcome"] == "skipped")
    assert {figure["detail"]["new"] for figure in rows["hits attnstore"]["figures"]} == {
        1, 2, 16, 128, 1_024,
    }  # fmt: skip
