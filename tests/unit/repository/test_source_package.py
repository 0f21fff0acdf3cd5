# SPDX-License-Identifier: Apache-2.0
"""The source package has all that a build may want, and no build of a user ends at a warning.

tools/check_package.py builds it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Stands in for pybind11 where it is there only while the package is built; nothing is compiled.
PYBIND11 = """
from setuptools import Extension
from setuptools.command.build_ext import build_ext
class Pybind11Extension(Extension):
    def __init__(self, name, sources, *, cxx_std, **options):
        super().__init__(name, sources, **options)
class ParallelCompile:
    def __init__(self, variable, default): pass
    def install(self): pass
"""
PRINT_FLAGS = """
import sys, setuptools
setuptools.setup = lambda **_: None
found = {}
exec(compile(open("setup.py").read(), "setup.py", "exec"), found)
print(*found["native"].extra_compile_args)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has, without what was built in it."""
    folder = tmp_path_factory.mktemp("source") / "clone"
    skipped = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("attnstore_vllm", "csrc", "configs", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stand-in")
    (folder / "pybind11").mkdir()
    (folder / "pybind11" / "__init__.py").touch()
    (folder / "pybind11" / "setup_helpers.py").write_text(PYBIND11)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def package(source: Path, environment: dict[str, str]) -> Path:
    """The unpacked source package."""
    out = source.parent / "dist"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(out)],
        cwd=source,
        env=environment,
        check=True,
        capture_output=True,
    )
    (archive,) = out.iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


def test_it_has_every_file_that_a_build_may_want(source: Path, package: Path) -> None:
    wanted = {
        path.relative_to(source)
        for folder in ("csrc", "attnstore_vllm", "configs")
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    assert len([path for path in wanted if path.suffix in (".cpp", ".cu", ".h")]) > 80
    missing = {path for path in wanted if not (package / path).is_file()}
    assert missing == set()
    assert (package / "setup.py").is_file()
    assert (package / "LICENSE").is_file()
    assert not list(package.rglob("*.so"))


@pytest.mark.parametrize("asked", [None, "1"])
def test_warnings_are_errors_for_those_who_work_on_it_and_for_no_user(
    source: Path, environment: dict[str, str], asked: str | None
) -> None:
    given = {key: value for key, value in environment.items() if key != "ATTNSTORE_WERROR"}
    if asked is not None:
        given["ATTNSTORE_WERROR"] = asked
    flags = subprocess.run(
        [sys.executable, "-c", PRINT_FLAGS],
        cwd=source,
        env=given,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "-Wall" in flags
    assert ("-Werror" in flags) == (asked is not None)


def test_gpu_check_takes_the_package_that_is_installed(tmp_path: Path) -> None:
    """And not the folder that `make` is run in."""
    assert "tools/run_installed.py benchmarks.gpu_check" in (ROOT / "Makefile").read_text()
    (tmp_path / "attnstore_vllm").mkdir()
    (tmp_path / "attnstore_vllm" / "__init__.py").touch()
    (tmp_path / "look.py").write_text(
        "import sys, attnstore_vllm, benchmarks\n"
        "print(attnstore_vllm.__file__, benchmarks.__path__[0], sys.argv[1:])"
    )
    found = subprocess.run(
        [sys.executable, "tools/run_installed.py", "look", "--small"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    installed = tmp_path / "attnstore_vllm" / "__init__.py"
    assert found == f"{installed} {ROOT / 'benchmarks'} ['--small']\n"
