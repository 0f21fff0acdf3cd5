# SPDX-License-Identifier: Apache-2.0
"""How often CUDA is called for a step's copies. Times are the benchmark's own business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from attnstore_vllm.transfer.worker_copies import LAYERS_A_SAVE
from benchmarks.cuda_host_time import BLOCK_TOKENS, LAYERS, PAGES, TOKENS

ROOT = Path(__file__).resolve().parents[3]


RUNS_IN_A_CALL = 1_024
"""Of the copy engines (csrc/cuda/batched_copy.cpp)."""


def test_a_layer_is_as_few_calls_as_can_be(tmp_path: Path) -> None:
    """In a process of its own: this one may have opened a driver."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.cuda_host_time", "--rounds", "1"]
    subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, timeout=120, check=True
    )
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * len(PAGES) * len(TOKENS)
    for row in rows:
        copies = 1 if row["what"] == "loads" else 2  # saves: a gather and a drain
        # A save's drain has whole chunks, a load by the copy engines a run a block.
        runs = row["tokens"] // BLOCK_TOKENS if row["what"] == "loads" and row["batches"] else 1
        together = 1 if row["what"] == "loads" else LAYERS_A_SAVE
        calls = copies * -(-LAYERS // together) * -(-runs // RUNS_IN_A_CALL)
        assert row["launches"] + row["batches"] == calls, row
        assert row["copies"] <= 1, "one table, which goes over once"
        # Loads: an event, and of the model's wait a look, a mark and the wait. Saves: the gather's
        # event, the drain's wait and event. And looks when the step ends.
        assert row["stream_calls"] <= (12 if row["what"] == "loads" else 5) * LAYERS, row
