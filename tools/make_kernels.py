# SPDX-License-Identifier: Apache-2.0
"""Compiles csrc/cuda/kernels.cu into attnstore_vllm/kernels, which is committed.

    python3 tools/make_kernels.py

Needs nvcc 13.0 or newer on PATH. To be run when the kernels' sources have changed; a test compares
their digest with the one in manifest.json. Comments and spaces do not count.

- A cubin for each of ARCHITECTURES. A driver takes them if it is as new as that nvcc.
- PTX for all others: for newer devices, and for older drivers. nvcc writes the version of its own
  CUDA into it. PTX_VERSION is put there instead, and ptxas, which makes the cubins from this very
  text, refuses what that version does not have.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SOURCE = "cuda/kernels.cu"
KERNELS = ROOT / "attnstore_vllm" / "kernels"
ARCHITECTURES = (80, 90, 100)
PTX_ARCHITECTURE = 80
PTX_VERSION = "8.0"
"""Of CUDA 12.0: drivers from 525 on."""
FLAGS = ("-std=c++17", "-O3", "-I", str(CSRC), "-Werror=all-warnings")


def sources(name: str = SOURCE) -> list[str]:
    """The file and the files of ours that it includes, as paths below csrc."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += re.findall(r'^#include "(.*)"', (CSRC / one).read_text(), re.MULTILINE)
    return sorted(found)


def digest() -> str:
    """Of the sources' words, without comments."""
    hasher = hashlib.sha256(f"{FLAGS[:2]} {ARCHITECTURES} {PTX_VERSION}".encode())
    for name in sources():
        text = re.sub(r"//.*", "", (CSRC / name).read_text())
        hasher.update(" ".join(text.split()).encode())
    return hasher.hexdigest()


def nvcc_version() -> str:
    """Raises: FileNotFoundError without nvcc."""
    told = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", told)
    assert found is not None, told
    return found[1]


def to_ptx(written: str) -> str:
    """As PTX_VERSION has it. The only thing of a newer version that nvcc writes is a hint."""
    text = re.sub(r"^\.version .*", f".version {PTX_VERSION}", written, flags=re.MULTILINE)
    text = re.sub(r"^\s*\.pragma \"used_bytes_mask .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^//.*\n", "", text, flags=re.MULTILINE)


def make(folder: Path) -> str:
    """Compile everything into a folder; ptxas's lines about registers."""
    ptx = folder / f"compute_{PTX_ARCHITECTURE}.ptx"
    subprocess.run(
        [
            "nvcc",
            *FLAGS,
            f"-arch=compute_{PTX_ARCHITECTURE}",
            "-ptx",
            str(CSRC / SOURCE),
            "-o",
            str(ptx),
        ],
        check=True,
    )
    ptx.write_text(to_ptx(ptx.read_text()))
    told = ""
    for number in ARCHITECTURES:
        cubin = folder / f"sm_{number}.cubin"
        told += subprocess.run(
            ["ptxas", "-v", f"-arch=sm_{number}", str(ptx), "-o", str(cubin)],
            check=True,
            stderr=subprocess.PIPE,
            text=True,
        ).stderr
    return told


def registers(told: str) -> dict[str, int]:
    """The most that a kernel uses on any architecture. Raises: RuntimeError for a spilt one."""
    found: dict[str, int] = {}
    name = ""
    for line in told.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        if (spills := re.search(r"(\d+) bytes spill stores", line)) and spills[1] != "0":
            raise RuntimeError(f"{name} has too few registers: {line.strip()}")
        if used := re.search(r"Used (\d+) registers", line):
            found[name] = max(found.get(name, 0), int(used[1]))
    return dict(sorted(found.items()))


def main() -> int:
    try:
        version = nvcc_version()
    except FileNotFoundError:
        print("make_kernels: no nvcc on PATH (CUDA toolkit 13.0 or newer)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        used = registers(make(folder))
        manifest = {
            "about": "made by tools/make_kernels.py",
            "sources": digest(),
            "nvcc": version,
            "ptx_version": PTX_VERSION,
            "registers": used,
            "files": {
                path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(folder.iterdir())
            },
        }
        KERNELS.mkdir(exist_ok=True)
        for path in [*KERNELS.iterdir()]:
            path.unlink()
        for path in folder.iterdir():
            (KERNELS / path.name).write_bytes(path.read_bytes())
        (KERNELS / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name, count in used.items():
        print(f"{name}: {count} registers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
