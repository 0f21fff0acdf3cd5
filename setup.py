# SPDX-License-Identifier: Apache-2.0
"""Builds attnstore_vllm._native, _native_cuda and _pausing_clock; everything else about the package
is in pyproject.toml.

Two parts of _native are built where their headers are: checksums of many pages at once (xxhash.h)
and the io_uring device (liburing as well). Without them the package works, more slowly. liburing
is linked statically where there is a static one, so that a wheel needs none where it is installed.
CUDA is not needed: _native_cuda opens the driver when it is used, and its kernels are in the
package (tools/make_kernels.py).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError, LinkError

SOURCES = ["bind/module", "bind/bind_prefix_index", "bind/bind_content_index", "bind/bind_rotator"]
SOURCES += ["copy/page_copier", "copy/page_runs", "copy/stream_copy", "copy/omp_team"]
SOURCES += ["index/prefix_index", "index/prefix_index_recovery", "index/prefix_index_sketch"]
SOURCES += ["bind/bind_chunk_keys", "index/chunk_keys", "index/blake3"]
SOURCES += ["rotate/page_rotator", "rotate/moved_tokens", "rotate/rotate_block"]
SOURCES += ["rotate/rotate_block_avx2", "rotate/rotate_block_avx512", "rotate/rotate_block_bf16"]
SOURCES += [
    "bind/bind_codec",
    "bind/bind_encoded",
    "copy/encoded_copier",
    *(f"codec/{path.stem}" for path in sorted(Path("csrc/codec").glob("*.cpp"))),
]
SOURCES += [
    "content/content_index",
    "content/content_find",
    "content/content_find_all",
    "content/content_anchors",
]
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

URING_LIBRARIES = ["-l:liburing.a", "-luring"]  # the first that links

CUDA_SOURCES = ["bind/cuda_module", "cuda/driver", "cuda/kernels", "cuda/batched_copy"]
CUDA_SOURCES += ["cuda/cuda_copier", "cuda/copy_jobs", "cuda/cuda_rotator", "cuda/rotate_jobs"]
CUDA_SOURCES += ["copy/page_runs", "rotate/moved_tokens"]


class Build(build_ext):
    """Looks which headers there are, and says what is left out without them."""

    def build_extensions(self) -> None:
        self.force = True  # a header may have come or gone since the last build
        self._find_headers()
        super().build_extensions()

    def _find_headers(self) -> None:
        if not self._links(XXHASH_PROBE):
            print(
                "attnstore: no xxhash.h (Debian: libxxhash-dev); built without io_uring and "
                "without native checksums"
            )
            return
        self._add("ATTNSTORE_HAS_XXHASH", XXHASH_SOURCES)
        for library in URING_LIBRARIES:
            if self._links(URING_PROBE, library):
                self._add("ATTNSTORE_HAS_URING", URING_SOURCES)
                native.extra_link_args.append(library)
                return
        print("attnstore: no liburing (Debian: liburing-dev); built without io_uring")

    def _links(self, program: str, *libraries: str) -> bool:
        """Whether it can be part of a shared object, as _native is one."""
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "probe.cpp"
            source.write_text(program)
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=directory, extra_postargs=["-fPIC"]
                )
                self.compiler.link_shared_object(
                    objects, str(Path(directory) / "probe.so"), extra_postargs=[*libraries]
                )
            except (CompileError, LinkError):
                return False
        return True

    def _add(self, macro: str, sources: list[str]) -> None:
        native.define_macros.append((macro, "1"))
        native.sources += [f"csrc/{name}.cpp" for name in sources]


# For those who work on it (tools/setup_env.py): a user's newer compiler may warn of more.
WARNINGS_ARE_ERRORS = os.environ.get("ATTNSTORE_WERROR") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if WARNINGS_ARE_ERRORS else [])]


def extension(name: str, sources: list[str]) -> Pybind11Extension:
    return Pybind11Extension(
        f"attnstore_vllm.{name}",
        [f"csrc/{source}.cpp" for source in sources],
        depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=["-O3", *WARNINGS, "-pthread"],
        extra_link_args=["-pthread", "-ldl"],
    )


ParallelCompile("ATTNSTORE_BUILD_JOBS", default=0).install()  # 0: one a processor
native = extension("_native", SOURCES)
cuda = extension("_native_cuda", CUDA_SOURCES)
clock = extension("_pausing_clock", ["io/pausing_clock"])
# It is loaded before all else of its process: it must not bring a libstdc++ of its own choice.
clock.extra_compile_args += ["-fno-exceptions", "-fno-rtti"]
clock.extra_link_args = ["-Wl,--as-needed"]

setup(ext_modules=[native, cuda, clock], cmdclass={"build_ext": Build})
