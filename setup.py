# SPDX-License-Identifier: Apache-2.0
"""Builds attnstore_vllm._native and, where nvcc is, attnstore_vllm._native_cuda; everything else
about the package is in pyproject.toml.

Two parts of _native are built where their headers are: checksums of many pages at once (xxhash.h)
and the io_uring device (liburing as well). Without them the package works, more slowly. Without
_native_cuda it works on vLLM's CPU build only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import Extension, setup
from setuptools.errors import CompileError, LinkError

SOURCES = ["bind/module", "bind/bind_prefix_index", "bind/bind_content_index", "bind/bind_rotator"]
SOURCES += ["copy/page_copier", "copy/page_runs", "copy/stream_copy", "copy/omp_team"]
SOURCES += ["index/prefix_index", "index/prefix_index_recovery", "index/prefix_index_sketch"]
SOURCES += ["rotate/page_rotator", "rotate/moved_tokens", "rotate/rotate_block"]
SOURCES += ["rotate/rotate_block_avx2", "rotate/rotate_block_avx512", "rotate/rotate_block_bf16"]
SOURCES += ["content/content_index", "content/content_find", "content/content_anchors"]
XXHASH_SOURCES = ["bind/bind_checksum", "io/checksum", "io/checksum_avx2"]
URING_SOURCES = [
    "bind/bind_uring",
    "io/uring_device",
    "io/uring_loop",
    "io/mailbox",
    "io/hash_pool",
]
XXHASH_PROBE = """
#define XXH_INLINE_ALL
#include <xxhash.h>
int main() { return static_cast<int>(XXH3_128bits("", 0).low64 & 1); }
"""
URING_PROBE = """
#include <liburing.h>
int main() { io_uring ring; return io_uring_queue_init(1, &ring, IORING_SETUP_CLAMP) > 0; }
"""

CUDA_SOURCES = ["bind/cuda_module.cpp", "cuda/cuda_copier.cpp", "cuda/batched_copy.cpp"]
CUDA_SOURCES += ["cuda/copy_jobs.cpp", "cuda/copy_kernel.cu", "copy/page_runs.cpp"]
CUDA_SOURCES += ["cuda/cuda_rotator.cpp", "cuda/rotate_jobs.cpp", "cuda/rotate_kernel.cu"]
CUDA_SOURCES += ["rotate/moved_tokens.cpp"]
ARCHITECTURES = (80, 90, 100)


class Build(build_ext):
    """Looks which headers and compilers there are, and says what is left out without them."""

    def build_extensions(self) -> None:
        self.force = True  # a header may have come or gone since the last build
        self._find_headers()
        why_not = self._build_cuda()
        if why_not:
            self.extensions.remove(cuda)
            # One of an earlier build may not go with the rest of the package.
            for stale in Path("attnstore_vllm").glob("_native_cuda*.so"):
                stale.unlink()
            print(f"attnstore: {why_not}; built without CUDA")
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if ext is not cuda:
            super().build_extension(ext)

    def _find_headers(self) -> None:
        if self._links(XXHASH_PROBE, []):
            self._add("ATTNSTORE_HAS_XXHASH", XXHASH_SOURCES)
            if self._links(URING_PROBE, ["uring"]):
                self._add("ATTNSTORE_HAS_URING", URING_SOURCES)
                native.libraries.append("uring")
            else:
                print("attnstore: no liburing (Debian: liburing-dev); built without io_uring")
        else:
            print(
                "attnstore: no xxhash.h (Debian: libxxhash-dev); built without io_uring and "
                "without native checksums"
            )

    def _build_cuda(self) -> str:
        """Compile and link the CUDA half; returns why that could not be, or ""."""
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            return "no nvcc"
        folder = Path(self.build_temp) / "cuda"
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(cuda.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = _run(nvcc, "--list-gpu-arch").split()
            wanted = [arch for arch in ARCHITECTURES if f"compute_{arch}" in known]
            codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
            newest = wanted[-1]  # later devices compile its PTX
            codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
            include = [*native.include_dirs, sysconfig.get_path("include")]
            flags = [*NVCC_FLAGS, *(f"-isystem={path}" for path in include)]
            objects = []
            for source in CUDA_SOURCES:
                objects.append(str(folder / f"{Path(source).name}.o"))
                _run(nvcc, *flags, *codes, "-c", f"csrc/{source}", "-o", objects[-1])
            _run(nvcc, *NVCC_LINK_FLAGS, *codes, *objects, "-o", str(target))
        except (OSError, IndexError, subprocess.CalledProcessError) as error:
            log = Path("build") / "nvcc.log"  # what is in build_temp may not last
            log.parent.mkdir(exist_ok=True)
            log.write_text(getattr(error, "stderr", None) or str(error))
            return f"nvcc failed (see {log})"
        return ""

    def _links(self, program: str, libraries: list[str]) -> bool:
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "probe.cpp"
            source.write_text(program)
            try:
                objects = self.compiler.compile([str(source)], output_dir=directory)
                self.compiler.link_executable(
                    objects, str(Path(directory) / "probe"), libraries=libraries
                )
            except (CompileError, LinkError):
                return False
        return True

    def _add(self, macro: str, sources: list[str]) -> None:
        native.define_macros.append((macro, "1"))
        native.sources += [f"csrc/{name}.cpp" for name in sources]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# For those who work on it (tools/setup_env.py): a user's newer compiler may warn of more.
WARNINGS_ARE_ERRORS = os.environ.get("ATTNSTORE_WERROR") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if WARNINGS_ARE_ERRORS else [])]
NVCC_FLAGS = ["-std=c++17", "-O3", *(["-Werror=all-warnings"] if WARNINGS_ARE_ERRORS else [])]
NVCC_FLAGS += [f"-Xcompiler={','.join(WARNINGS)},-fPIC,-fvisibility=hidden"]
# A CUDA runtime of our own, hidden from others: the module is importable without a driver, and
# PyTorch's runtime, of whatever version, does not take its calls.
NVCC_LINK_FLAGS = ["-shared", "-cudart=static", "-Xlinker=--exclude-libs=ALL"]

native = Pybind11Extension(
    "attnstore_vllm._native",
    [f"csrc/{name}.cpp" for name in SOURCES],
    depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=["-O3", *WARNINGS, "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
)

cuda = Extension(
    "attnstore_vllm._native_cuda", [f"csrc/{name}" for name in CUDA_SOURCES], optional=True
)

setup(ext_modules=[native, cuda], cmdclass={"build_ext": Build})
