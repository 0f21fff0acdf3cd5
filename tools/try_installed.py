# SPDX-License-Identifier: Apache-2.0
"""Try the attnstore_vllm that is installed, in an environment without vLLM and torch.

    python tools/try_installed.py [--needs uring]

Everything is imported that a server would, but for vLLM's side; every kernel of the manifest is
looked at; `attnstore` answers --version, init, check and doctor as it should. Exit 1 and one
sentence if anything does not. For wheels, by tools/check_package.py and cibuildwheel.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = {"sm_80.cubin", "sm_90.cubin", "sm_100.cubin", "compute_80.ptx"}
MAY_LACK = {
    "attnstore_lab.bench": {"aiohttp"},  # the extra named bench
    "attnstore_vllm.connector": {"vllm", "torch", "prometheus_client"},
    "attnstore_vllm.identity": {"vllm", "torch"},
    "attnstore_lab.testing": {"torch", "tokenizers", "safetensors", "transformers"},
    "attnstore_vllm.transfer": {"torch"},
}
"""Modules of these packages may lack what is not installed with the package."""
SETTINGS = "dram: 64MiB\nnvme: {{path: {path}, capacity: 64MiB}}\n"


def expect(is_so: bool, what: str) -> None:
    if not is_so:
        sys.exit(f"try_installed: {what}")


def try_import() -> int:
    """Import every module. Returns how many there are; those of vLLM's side may lack vLLM."""
    files = []
    for package in ("attnstore_lab", "attnstore_vllm"):
        where = Path(str(importlib.import_module(package).__file__)).parent
        expect(where.parent != HERE.parent, f"{where} is the checkout, not what was installed")
        files += [path.relative_to(where.parent).with_suffix("") for path in where.rglob("*.py")]
    names = sorted(".".join(file.parts).removesuffix(".__init__") for file in files)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
            missing = cause.name if isinstance(cause, ModuleNotFoundError) else ""
            lacked = MAY_LACK.get(".".join(name.split(".")[:2]), set())
            is_known = (missing or "").partition(".")[0] in lacked
            expect(is_known, f"{name} cannot be imported: {error}")
    expect((where / "py.typed").is_file(), f"{where} has no py.typed")
    return len(names)


def try_kernels() -> None:
    """The kernels for CUDA are those that the manifest names, byte for byte."""
    where = Path(str(importlib.import_module("attnstore_vllm").__file__)).parent / "kernels"
    files = json.loads((where / "manifest.json").read_text(encoding="utf-8"))["files"]
    expect(set(files) == KERNELS, f"kernels are {sorted(files)}; expected {sorted(KERNELS)}")
    for name, digest in files.items():
        found = hashlib.sha256((where / name).read_bytes()).hexdigest()
        expect(found == digest, f"{where / name} has SHA-256 {found}; the manifest has {digest}")
    importlib.import_module("attnstore_vllm._native_cuda")
    clock = importlib.util.find_spec("attnstore_vllm._pausing_clock")
    expect(clock is not None, "there is no _pausing_clock, which is preloaded and never imported")


def attnstore(*arguments: str, code: int = 0) -> str:
    command = [str(Path(sys.executable).parent / "attnstore"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    expect(done.returncode == code, f"{command} ended with {done.returncode}:\n{said}")
    expect("Traceback" not in said, f"{command} ended in a traceback:\n{said}")
    return done.stdout


def try_commands(*, needs_uring: bool) -> dict[str, str]:
    """Returns what doctor found, by the name of each check."""
    version = importlib.metadata.version("attnstore-vllm")
    expect(f"attnstore {version}" in attnstore("--version"), "--version does not name the version")
    with tempfile.TemporaryDirectory(prefix="attnstore-try-") as folder:
        right, wrong = Path(folder) / "right.yaml", Path(folder) / "wrong.yaml"
        right.write_text(SETTINGS.format(path=f"{folder}/tier"), encoding="utf-8")
        wrong.write_text("dram: 64\n", encoding="utf-8")
        attnstore("check", str(right))
        attnstore("check", str(wrong), code=1)
        expect("nvme" in attnstore("init", "--dir", f"{folder}/tier"), "init names no nvme")
        told = json.loads(attnstore("doctor", str(right), "--json", code=1))
    found = {one["check"]: f"{one['state']}: {one['found']}" for one in told["checks"]}
    bad = [one["check"] for one in told["checks"] if one["state"] == "bad"]
    expect(bad == ["vLLM"], f"doctor says bad of {bad}, and not of vLLM alone: {found}")
    expect("not installed" in found["vLLM"], f"doctor says {found['vLLM']} of vLLM")
    has_uring = found["io_uring"].startswith("ok")
    expect(has_uring == needs_uring, f"doctor says of io_uring {found['io_uring']}")
    expect("disk speed" in found, f"doctor has measured no disk: {sorted(found)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--needs", choices=["uring"], help="fail without it; else fail with it")
    is_needed = parser.parse_args().needs is not None
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    num_modules = try_import()
    try_kernels()
    found = try_commands(needs_uring=is_needed)
    told = "; ".join(f"{name} {found[name]}" for name in ("vLLM", "io_uring", "disk speed"))
    print(f"Python {sys.version.split()[0]}: {num_modules} modules, {len(KERNELS)} kernels; {told}")


if __name__ == "__main__":
    main()
