# SPDX-License-Identifier: Apache-2.0
"""The command that makes the wheels, without a build: which Pythons, what lies in dist/, and that
no compiler can be called where a wheel is tried. tools/make_wheels.py makes and tries real ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import check_package, make_wheels
from tools.check_package import Failed

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SOURCE = "attnstore_vllm-0.1.0"


def steps(job: str, key: str) -> list[str]:
    return [step[key] for step in WORKFLOW["jobs"][job]["steps"] if key in step]


def fake_python(folder: Path, version: str, answer: str) -> Path:
    file = folder / f"python{version}"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{answer}\n")
    file.chmod(0o755)
    return file


def test_each_python_that_the_package_names_gets_a_wheel_and_is_tried() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert make_wheels.versions() == named
    assert WORKFLOW["jobs"]["install"]["strategy"]["matrix"]["python"] == named


def test_a_tag_publishes_what_was_made_by_that_command_and_tried() -> None:
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML takes `on` for true
    assert steps("build", "run") == ["python3 tools/make_wheels.py --by cibuildwheel"]
    assert (jobs["install"]["needs"], jobs["publish"]["needs"]) == ("build", "install")
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"
    assert not re.search(r"secrets\.|password", (ROOT / ".github/workflows/wheels.yml").read_text())


def test_every_action_is_pinned_to_a_commit() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", file.read_text(encoding="utf-8"))
        assert used and all(re.search(r"@[0-9a-f]{40}$", each) for each in used), file.name


def test_a_python_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert make_wheels.find_python("3.99", tmp_path / "pyenv") is None
    for patch in ("2", "10"):
        made = fake_python(tmp_path / "pyenv" / f"3.99.{patch}" / "bin", "3.99", "echo 3.99")
    assert make_wheels.find_python("3.99", tmp_path / "pyenv") == made
    shim = fake_python(tmp_path / "bin", "3.99", "exit 127")
    assert make_wheels.find_python("3.99", tmp_path / "pyenv") == made, "a shim that is off"
    fake_python(tmp_path / "bin", "3.99", "echo 3.98")
    assert make_wheels.find_python("3.99", tmp_path / "pyenv") == made, "another version"
    fake_python(tmp_path / "bin", "3.99", "echo 3.99")
    assert make_wheels.find_python("3.99", tmp_path / "pyenv") == shim


def test_no_compiler_can_be_called_where_a_wheel_is_tried(tmp_path: Path) -> None:
    env = check_package.without_compiler(tmp_path / "none")
    assert not env.keys() & {"CC", "CXX", "PYTHONPATH"}
    for name in ("cc", "g++", "clang++", "nvcc", "make"):
        done = subprocess.run(
            ["sh", "-c", f"{name} --version"], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 127
        assert done.stderr == f"there is no {name} on this machine\n"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been built, with the Python of each; nothing is."""
    asked: list[Any] = []

    def make_source(tools: Path, out: Path) -> Path:
        (out / f"{SOURCE}.tar.gz").touch()
        return out / SOURCE

    def build_wheel(tools: Path, source: Path, work: Path, **how: object) -> Path:
        assert how == {"with_headers": True, "compiler": None}
        asked.append((tools.name, source.name))
        return work / f"{SOURCE}-{work.name}-linux_x86_64.whl"

    def check_libraries(tools: Path, wheel: Path, work: Path) -> str:
        (work / "repaired").mkdir()
        name = wheel.name.replace("linux", "manylinux_2_35")
        (work / "repaired" / name).touch()
        return name

    def try_wheel(wheel: Path, work: Path, *, with_headers: bool, python: Path) -> str:
        assert "manylinux" in wheel.name and with_headers
        asked.append(python)
        return "tried"

    for stand_in in (make_source, build_wheel, check_libraries, try_wheel):
        monkeypatch.setattr(check_package, stand_in.__name__, stand_in)
    monkeypatch.setattr(check_package, "has_headers", lambda: True)
    monkeypatch.setattr(make_wheels, "tools_of", lambda name, *_: tmp_path / name)
    monkeypatch.setattr(
        make_wheels, "find_python", lambda v: None if v == "3.13" else Path(f"/usr/bin/python{v}")
    )
    return asked


def test_one_command_makes_and_tries_a_wheel_of_each_python(
    made: list[Any], tmp_path: Path
) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    (out / "attnstore_vllm-0.0.9-cp311-cp311-linux_x86_64.whl").touch()
    (out / "another.whl").touch()
    assert make_wheels.make(["3.10", "3.12"], out, is_here=True) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {
        "another.whl", f"{SOURCE}.tar.gz", f"{SOURCE}-3.10-manylinux_2_35_x86_64.whl",
        f"{SOURCE}-3.12-manylinux_2_35_x86_64.whl",
    }  # fmt: skip
    assert made == [
        ("wheels-3.10", SOURCE), Path("/usr/bin/python3.10"),
        ("wheels-3.12", SOURCE), Path("/usr/bin/python3.12"),
    ]  # fmt: skip


def test_a_python_that_is_not_there_is_named_and_the_others_are_made(
    made: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_wheels.make(["3.13", "3.11"], tmp_path / "dist", is_here=True) == 1
    assert "NOT MADE for 3.13" in capsys.readouterr().out
    assert len(list((tmp_path / "dist").glob("*.whl"))) == 1


def test_without_the_headers_nothing_is_made(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_package, "has_headers", lambda: False)
    with pytest.raises(Failed, match="liburing-dev libxxhash-dev"):
        make_wheels.make(["3.11"], tmp_path / "dist", is_here=True)
    assert not made


def test_in_containers_cibuildwheel_is_told_which(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*command: object, cwd: Path, env: dict[str, str]) -> str:
        made.append(([*map(str, command)][1:], env["CIBW_BUILD"]))
        return ""

    monkeypatch.setattr(make_wheels, "run", run)
    out = tmp_path / "dist"
    assert make_wheels.make(["3.10", "3.12"], out, is_here=False) == 0
    words = ["--platform", "linux", "--output-dir", str(out), str(make_wheels.ROOT)]
    assert made == [(words, "cp310-* cp312-*")]


def test_a_python_that_is_not_published_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_wheels", "--only", "3.9", "--by", "here"])
    assert make_wheels.main() == 1
    assert "--only is 3.9; expected some of 3.10, 3.11, 3.12, 3.13" in capsys.readouterr().out
