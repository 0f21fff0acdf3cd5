# SPDX-License-Identifier: Apache-2.0
"""What set-up depends on: headers that came or went build the extension anew, and it says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parents[3]
PROJECT = 2
"""The step that builds the extension."""


def stamps() -> list[str]:
    return [wanted for _, _, wanted in setup_env.project_steps()]


@pytest.mark.parametrize("name", setup_env.HEADERS)
def test_a_header_that_came_builds_the_extension_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = stamps()
    assert stamps() == before
    monkeypatch.setenv("CPATH", str(tmp_path))  # which compilers look in first
    assert stamps() == before
    (tmp_path / name).write_text("int another;\n")
    after = stamps()
    assert after[:PROJECT] == before[:PROJECT] and after[PROJECT] != before[PROJECT]
    (tmp_path / name).write_text("#error none\n")
    assert stamps()[PROJECT] != after[PROJECT]
    (tmp_path / name).unlink()
    assert stamps() == before


def test_what_it_was_built_without_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "attnstore_vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_native.py").write_text("has_uring = False\n")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "PYTHON", Path(sys.executable))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = setup_env.built_without()
    assert said is not None and said.startswith("built without io_uring and native checksums: ")
    assert said.splitlines()[1] == f"To add them: {setup_env.ADDS_HEADERS} && make setup"
    (package / "_native.py").write_text("has_uring = True\npage_checksums = None\n")
    assert setup_env.built_without() is None


def test_the_command_is_the_one_that_pages_name() -> None:
    packages = set(re.findall(r"lib\w+-dev", setup_env.ADDS_HEADERS))
    for page in ("README.md", "docs/getting-started-cpu.md", ".ci/run"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert packages <= set(re.findall(r"lib\w+-dev", text)), page


def test_it_runs_without_anything_installed() -> None:
    code = "import sys; sys.path.insert(0, '.'); import tools.setup_env as s; print(s.headers())"
    bare = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert bare.stdout.strip() == setup_env.headers()


def test_a_long_step_is_not_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    said = "Collecting one\\n  Downloading one.whl (3 MB)\\nnoise\\n"
    code = f"import time; print('{said}', flush=True); time.sleep(1.5)"
    assert setup_env.run_aloud([sys.executable, "-c", code], log, every_s=0.3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and lines[-1].endswith(" s: Downloading one.whl (3 MB)")
    assert "noise" in log.read_text()


def test_a_step_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env, "PYTHON", tmp_path / "bin" / "python")
    (tmp_path / "bin").mkdir()
    setup_env.PYTHON.write_text("#!/bin/sh\necho there is no such wheel >&2\nexit 1\n")
    setup_env.PYTHON.chmod(0o755)
    with pytest.raises(SystemExit, match=re.escape(str(tmp_path / setup_env.LOG))):
        setup_env.pip("absent")
    assert "there is no such wheel" in capsys.readouterr().out


def test_an_interrupt_ends_the_step(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    outer = (
        "import sys, signal; from tools import setup_env; from pathlib import Path\n"
        "setup_env.doing = lambda log: signal.raise_signal(signal.SIGINT)\n"
        f"setup_env.run_aloud([sys.executable, '-c', {code!r}], Path({str(tmp_path / 'log')!r}), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", outer], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    if pid.exists():  # else it had not even begun
        assert not Path(f"/proc/{pid.read_text()}").exists()
