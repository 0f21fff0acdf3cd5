# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare` with real servers; a minute, most of it their starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from benchmarks.compare.command import main
from benchmarks.sample import SAMPLE


@pytest.mark.long
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_store_is_compared_with_recomputation(tmp_path: Path, models: Path, api: str) -> None:
    out = tmp_path / "out"
    code = main([
        "--model", str(make_model(models / "tiny", TINY)), "--data",
        str(SAMPLE), "--systems", "re,attnstore", "--serve=--enforce-eager", "--api", api,
        "--rate", "4", "--sessions", "6", "--think", "exponential:0.5", "--turns", "3",
        "--max-tokens", "16", "--ignore-eos", "--max-model-len", "1280", "--out", str(out),
        "--store", '{"compute_if_sooner": false}',
    ])  # fmt: skip
    assert code == 0
    found = json.loads((out / "compare.json").read_text())["systems"]
    re, ours = found["re"]["figures"], found["attnstore"]["figures"]
    assert (re["requests"], re["failed"]) == (ours["requests"], ours["failed"]) == (18, 0)
    assert (re["prefill_by"], re["hit_tokens"]) == ("steps", 0)
    assert set(re["by_source"]) == {"computed", "HBM"}
    # Every question finds its history in some tier, up to answers that do not tokenize back.
    least = 0.85 if api == "chat" else 0.95
    assert least < ours["hit_over_unlimited"] <= 1.0
    assert ours["by_source"]["computed"] < 0.6 * re["by_source"]["computed"]
    assert ours["prefill_s"] > 0
    assert not list(out.glob("kv-*"))
    assert not _servers(str(models))


def _servers(model: str) -> list[psutil.Process]:
    """Of this model, that still run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(model in a for a in process.info["cmdline"] or ()):
            found.append(process)
    return found
