# SPDX-License-Identifier: Apache-2.0
"""Runs our two sides with the scheduler of a vLLM that cannot be installed here.

    python3 tools/try_scheduler.py 0.33.0                     (all files of SCRIPTED)
    python3 tools/try_scheduler.py 0.33.0 test_async_stops    (these; others stay as they were)

The Python files of its wheel (tools/check_sources.py) come before the installed vLLM, in a process
of its own for each file of tests. So its scheduler, its block pool, its KV cache managers and its
hooks run, over a scripted model (tests/vllm/scripted.py). No model, no kernel and no worker of that
version does. What came of it is kept in results/versions.json, and the table of
docs/compatibility.md is written. Exit 1 if a test fails.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import check_sources, setup_env, try_version  # noqa: E402

SCRIPTED = (
    "test_async_scheduling",
    "test_async_stops",
    "test_context_ranks",
    "test_context_stages",
    "test_copy_races",
    "test_drafts_scheduled",
    "test_groups_scheduled",
    "test_hints",
    "test_named_weights",
    "test_nodes_scheduled",
    "test_pipeline_scheduled",
    "test_rests",
    "test_save_races",
    "test_shorter_takes",
    "test_specs",
    "test_specs_scheduled",
    "test_stages",
    "test_streaming",
)
"""Files of tests/vllm that need vLLM's scheduler and no model."""


def run(sources: Path, test: str) -> dict[str, int]:
    """Tests of one file by outcome."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "junit.xml"
        path = os.pathsep.join([str(sources), str(ROOT)])
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code = try_version.run(setup_env.PYTHON, *command, f"tests/vllm/{test}.py", path=path)
        if not report.is_file():
            print(f"{test}: pytest has ended with {code}")
            return {"passed": 0, "failed": 1, "skipped": 0}
        return try_version.counts(report)


def main() -> int:
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(SCRIPTED):
        sys.exit(__doc__)
    version, *tests = sys.argv[1:]
    sources = check_sources.download(version)
    failed = 0
    for test in tests or SCRIPTED:
        found = run(sources, test)
        try_version.keep_scheduled(version, test, found)
        print(f"vLLM {version}, its scheduler, {test}: {found}", flush=True)
        failed += found["failed"]
    try_version.write_table()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
