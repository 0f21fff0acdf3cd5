# SPDX-License-Identifier: Apache-2.0
"""Other versions of vLLM: what a start says, what is known of their sources, and the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnstore_vllm.preflight import TESTED_VLLM
from tools import check_sources, setup_env, try_scheduler, try_version

BASE_LINE = "    def on_new_request("


def test_a_vllm_without_what_is_needed_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import attnstore_vllm.connector"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{check_sources.ROOT}"},
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedError: AttnStore cannot be used with " in last
    assert "No module named 'vllm.distributed'" in last
    assert ", ".join(TESTED_VLLM) in last and "--kv-transfer-config" in last


def test_setup_does_not_show_what_pip_says_of_packages_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM asks for them, and pip calls it an error, in red, that they are not there."""
    asked: list[list[str]] = []

    def run(command: list[str], _log: Path) -> int:
        asked.append(command)
        return 0

    monkeypatch.setattr(setup_env, "run_aloud", run)
    setup_env.install_torch()
    assert "--no-warn-conflicts" in asked[0] and asked[0][-1] == setup_env.TORCH


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The installed vLLM's Python files that the package imports from."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    packages = Path(spec.origin).parents[1]
    names = {module.replace(".", "/") for _, module, _ in check_sources.imported()}
    theirs = [check_sources.BASE, *(module for _, module, _ in check_sources.GONE_BY)]
    theirs += [module for _, module, _ in check_sources.MEMBERS]
    names |= {path.removesuffix(".py") for path in theirs}
    for name in names:
        for file in (Path(f"{name}.py"), Path(name) / "__init__.py"):
            if (packages / file).is_file():
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(packages / file, tmp_path / file)
    return tmp_path


def test_the_installed_version_has_all_that_is_needed(sources: Path) -> None:
    problems, _ = check_sources.check(sources)
    assert not [p for p in problems if not p.endswith((" has no platforms", " has no envs"))]


def test_what_is_missing_is_named(sources: Path) -> None:
    base = sources / check_sources.BASE
    text = base.read_text(encoding="utf-8")
    assert BASE_LINE in text
    changed = text.replace(BASE_LINE, "    def on_new_question(")
    changed = changed.replace("connector_output: ", "output: ")
    base.write_text(changed, encoding="utf-8")
    (sources / "vllm/config/__init__.py").write_text("")
    request = sources / "vllm/v1/request.py"
    request.write_text(request.read_text(encoding="utf-8").replace("_block_hasher", "_hasher"))
    output = sources / "vllm/v1/core/sched/output.py"
    text = output.read_text(encoding="utf-8")
    output.write_text(text.replace("preempted_req_ids", "preempted_ids"), encoding="utf-8")
    problems, new = check_sources.check(sources)
    assert any(p.endswith("output.py has no preempted_req_ids") for p in problems)
    assert "the hook on_new_request is gone" in problems
    assert any(hook.startswith("on_new_question(") for hook in new)
    assert any("update_connector_output takes" in problem for problem in problems)
    assert any("vllm.config has no VllmConfig" in problem for problem in problems)
    assert "scheduler/hidden_blocks.py: vllm/v1/request.py has no _block_hasher" in problems


def test_the_table_is_what_the_runs_gave() -> None:
    assert try_version.table() in try_version.PAGE.read_text(encoding="utf-8"), (
        "run python3 tools/try_version.py --table"
    )


def test_what_is_said_of_sources_is_of_all_names_that_are_gone_by_now() -> None:
    """Of a version that cannot be installed here: another import has it looked at again."""
    results = json.loads(try_version.RESULTS.read_text(encoding="utf-8"))
    said = {v: found["names"] for v, found in results.items() if "names" in found}
    assert said
    for version, names in said.items():
        wanted = f"run python3 tools/check_sources.py {version}"
        assert names == check_sources.num_names(), wanted


def test_files_that_ran_with_their_scheduler_are_those_that_need_no_more() -> None:
    """None that is another file by now is counted."""
    results = json.loads(try_version.RESULTS.read_text(encoding="utf-8"))
    said = {v: found["scheduled"] for v, found in results.items() if "scheduled" in found}
    assert said
    for version, files in said.items():
        assert set(files) == set(try_scheduler.SCRIPTED), version
        assert not any(found["failed"] for found in files.values()), version
        assert f"in {len(files)} files with its scheduler" in try_version.table()


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3"/></testsuites>'
    )
    assert try_version.counts(report) == {"passed": 4, "failed": 3, "skipped": 3}
