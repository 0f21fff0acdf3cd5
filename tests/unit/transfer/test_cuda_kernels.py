# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels are those of the sources; devices get the right ones; the driver's calls are
declared as NVIDIA declares them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer import cuda_kernels
from attnstore_vllm.transfer.cuda_kernels import FOLDER, OLDEST_DRIVER, images_for, load_kernels
from tools import make_kernels

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
WHY = "import attnstore_vllm._native_cuda as native; print(native.why_no_driver())"


def test_the_compiled_kernels_are_those_of_the_sources() -> None:
    assert MANIFEST["sources"] == make_kernels.digest(), (
        "the kernels' sources have changed: run tools/make_kernels.py, with nvcc, and commit "
        "attnstore_vllm/kernels"
    )
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()}
    del found["manifest.json"]
    assert found == MANIFEST["files"]


def test_there_is_one_for_each_architecture_and_ptx_that_old_drivers_read() -> None:
    for number in make_kernels.ARCHITECTURES:
        assert (FOLDER / f"sm_{number}.cubin").read_bytes()[:4] == b"\x7fELF"
    ptx = (FOLDER / f"compute_{make_kernels.PTX_ARCHITECTURE}.ptx").read_text()
    assert f".version {MANIFEST['ptx_version']}\n.target sm_80\n" in ptx
    assert (MANIFEST["ptx_version"], OLDEST_DRIVER) == ("8.0", "525")  # CUDA 12.0
    kernels = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    assert sorted(kernels) == sorted(MANIFEST["registers"])


def test_copies_fit_beside_kernels_that_leave_little_room() -> None:
    copies = {name: n for name, n in MANIFEST["registers"].items() if name.startswith("copy_")}
    assert len(copies) == 3
    assert max(copies.values()) <= 32


def test_nvcc_makes_the_same_again(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None or make_kernels.nvcc_version() != MANIFEST["nvcc"]:
        pytest.skip(f"no nvcc {MANIFEST['nvcc']}")
    assert make_kernels.registers(make_kernels.make(tmp_path)) == MANIFEST["registers"]
    made = {path.name: sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert made == MANIFEST["files"]


def test_a_comment_is_no_change_and_a_number_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_kernels.digest()
    for name in make_kernels.sources():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "csrc" / name, tmp_path / name)
    monkeypatch.setattr(make_kernels, "CSRC", tmp_path)
    words = tmp_path / "cuda" / "copy_words.h"
    words.write_text("// more\n\n" + words.read_text())
    assert make_kernels.digest() == before
    words.write_text(words.read_text().replace("kThreadsPerBlock = 128", "kThreadsPerBlock = 512"))
    assert make_kernels.digest() != before


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((7, 5), []),
        ((8, 0), ["sm_80.cubin", "compute_80.ptx"]),
        ((8, 9), ["sm_80.cubin", "compute_80.ptx"]),
        ((9, 0), ["sm_90.cubin", "compute_80.ptx"]),
        ((10, 3), ["sm_100.cubin", "compute_80.ptx"]),
        ((12, 0), ["compute_80.ptx"]),
    ],
)
def test_a_device_gets_cubins_of_its_generation_and_ptx(
    capability: tuple[int, int], names: list[str]
) -> None:
    assert [path.name for path in images_for(capability)] == names


def test_what_is_refused_is_said_with_the_driver() -> None:
    def refuse(device: int, images: list[bytes]) -> Any:
        raise RuntimeError("cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    native: Any = SimpleNamespace(
        capability=lambda device: (9, 0), driver_version=lambda: 11080, Kernels=refuse
    )
    with pytest.raises(UnsupportedError, match=r"UNSUPPORTED_PTX.*is of CUDA 11\.8, and 525"):
        load_kernels(native, 0)
    native.capability = lambda device: (7, 0)
    with pytest.raises(UnsupportedError, match=r"capability 7\.0, has no kernels.*8\.0 is"):
        load_kernels(native, 0)
    assert cuda_kernels.OLDEST == (8, 0)


@pytest.mark.parametrize("driver", ["/nowhere/libcuda.so.1", "libm.so.6"])
def test_without_a_driver_the_module_says_what_is_missing(driver: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WHY],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ATTNSTORE_CUDA_DRIVER": driver, "PYTHONPATH": str(ROOT)},
    ).stdout
    assert driver in told
    assert ("has no cuInit" in told) == (driver == "libm.so.6")


def test_the_module_needs_no_library_of_cuda() -> None:
    module = importlib.import_module("attnstore_vllm._native_cuda")
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    needed = subprocess.run(
        ["readelf", "-d", str(module.__file__)], check=True, capture_output=True, text=True
    ).stdout
    assert "NEEDED" in needed and "cuda" not in needed


def test_the_driver_is_declared_as_nvidia_declares_it(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc, and so no cuda.h")
    subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "-I",
            str(ROOT / "csrc"),
            "-c",
            "-o",
            str(tmp_path / "out.o"),
            str(ROOT / "csrc" / "tests" / "check_driver.cpp"),
        ],
        check=True,
    )
