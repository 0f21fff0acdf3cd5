# SPDX-License-Identifier: Apache-2.0
"""The C++ of the CUDA half over the fake driver (csrc/tests/fake_driver): compiled when it is first
wanted, by the compiler that builds the package, and what tests tell the driver.

It needs neither nvcc nor a GPU. The file is both, the Python module _native_cuda and the driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared",
    # Types of its own for Python, beside those of the module that is installed.
    "-DPYBIND11_COMPILER_TYPE=\"_fake\"",
)  # fmt: skip
SOURCES = (
    "bind/cuda_module.cpp", "cuda/cuda_copier.cpp", "cuda/batched_copy.cpp", "cuda/copy_jobs.cpp",
    "cuda/driver.cpp", "cuda/kernels.cpp", "cuda/cuda_rotator.cpp", "cuda/rotate_jobs.cpp",
    "copy/page_runs.cpp",
    "rotate/moved_tokens.cpp", "tests/fake_driver/memory.cpp",
    "tests/fake_driver/streams.cpp", "tests/fake_driver/host_kernels.cpp",
    "tests/fake_driver/state.cpp", "tests/fake_driver/driver_memory.cpp",
    "tests/fake_driver/driver_streams.cpp",
)  # fmt: skip
READ = ("bind", "copy", "cuda", "rotate", "tests/fake_driver")
FLAGS_VARIABLE = "ATTNSTORE_FAKE_FLAGS"
"""More flags for the compiler: tools/sanitize.sh has the sanitizers' here."""
BUILD_VARIABLE = "ATTNSTORE_FAKE_BUILD"
"""The folder that libraries are kept in; tests/cuda_faults.py shares it with its copies."""
DRIVER_VARIABLE = "ATTNSTORE_CUDA_DRIVER"
"""The native module opens this file in the place of libcuda.so.1."""
_KEPT = 12


def compile_module(csrc: Path, flags: Sequence[str] = ()) -> Path:
    """The library of the sources under `csrc`; an older one of the same bytes is taken.

    Raises: RuntimeError with the compiler's words.
    """
    import pybind11

    flags = (*FLAGS, *flags, *os.environ.get(FLAGS_VARIABLE, "").split())
    digest = sha256(repr((flags, SOURCES)).encode())
    for path in sorted(path for folder in READ for path in (csrc / folder).glob("*.[hc]*")):
        digest.update(f"{path.relative_to(csrc)}\0".encode() + path.read_bytes())
    folder = Path(os.environ.get(BUILD_VARIABLE, ROOT / "build" / "fake_driver"))
    library = folder / digest.hexdigest()[:16] / "_native_cuda.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    system = (sysconfig.get_path("include"), pybind11.get_include())
    options = [*flags, f"-I{csrc}", *(f"-isystem{path}" for path in system)]
    partial = library.with_suffix(f".{os.getpid()}")
    objects = [partial.with_name(f"{partial.name}.{i}.o") for i in range(len(SOURCES))]
    compiler = os.environ.get("CXX", "c++")
    running = [
        subprocess.Popen(
            [compiler, *options, "-c", str(csrc / source), "-o", str(made)],
            stderr=subprocess.PIPE, text=True,
        )
        for source, made in zip(SOURCES, objects, strict=True)
    ]  # fmt: skip
    told = [one.communicate()[1] for one in running]
    if any(one.returncode for one in running):
        raise RuntimeError("the CUDA half does not compile:\n" + "\n".join(filter(None, told)))
    link = [compiler, *flags, *map(str, objects), "-o", str(partial), "-ldl"]
    subprocess.run(link, check=True)
    for made in objects:
        made.unlink()
    partial.rename(library)  # another process may have been as fast
    _forget_old(folder)
    return library


def _forget_old(folder: Path) -> None:
    """Keep the latest libraries only; sources change often where they are worked on."""
    libraries = sorted(folder.glob("*/_native_cuda.so"), key=lambda path: path.stat().st_mtime)
    for library in libraries[:-_KEPT]:
        library.unlink(missing_ok=True)
        library.parent.rmdir()


@cache
def _library() -> Path:
    return compile_module(ROOT / "csrc")


@cache
def native_module() -> ModuleType:
    """What stands in for attnstore_vllm._native_cuda: the same sources."""
    module = load_module(_library())
    with mock.patch.dict(os.environ, {DRIVER_VARIABLE: str(_library())}):
        assert not module.why_no_driver(), "it opens itself, and keeps that"
    return module


def load_module(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_native_cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def driver() -> Any:
    """The driver of that module."""
    native_module()
    return load_driver(_library())


def load_driver(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    u64, text = ctypes.c_uint64, ctypes.c_char_p
    handle, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    calls: tuple[tuple[Any, ...], ...] = (
        ("fake_reset", None, u64),
        ("fake_use", None, u64),
        ("fake_set", number, text, u64),
        ("fake_fail", None, text, u64, number),
        ("fake_forgive", None),
        ("fake_damage", None, text),
        ("fake_call", number, text),
        ("fake_add_memory", None, u64, size, number),
        ("fake_remove_memory", None, u64, number),
        ("fake_step", number),
        ("fake_clock", u64),
        ("fake_count", u64, text),
        ("fake_pending", u64, handle),
        ("fake_registered", u64),
        ("cuInit", number, ctypes.c_uint),
        ("cuDevicePrimaryCtxRetain", number, handle, number),
        ("cuCtxSetCurrent", number, handle),
        ("cuCtxSynchronize", number),
        ("cuStreamCreateWithPriority", number, handle, ctypes.c_uint, number),
        ("cuStreamSynchronize", number, handle),
        ("cuStreamWaitEvent", number, handle, handle, ctypes.c_uint),
        ("cuEventCreate", number, handle, ctypes.c_uint),
        ("cuEventDestroy_v2", number, handle),
        ("cuEventRecord", number, handle, handle),
        ("cuEventQuery", number, handle),
        ("cuEventSynchronize", number, handle),
        ("cuEventElapsedTime", number, handle, handle, handle),
        ("cuLaunchHostFunc", number, handle, handle, handle),
        ("cuGetErrorName", number, number, handle),
    )
    for name, result, *arguments in calls:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


if __name__ == "__main__":
    print(_library())
