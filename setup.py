# SPDX-License-Identifier: Apache-2.0
"""Builds attnstore_vllm._native; everything else about the package is in pyproject.toml.

Two parts of it are built where their headers are: checksums of many pages at once (xxhash.h) and
the io_uring device (liburing as well). Without them the package works, more slowly.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError, LinkError

SOURCES = ["module", "page_copier", "copy_runs", "stream_copy", "omp_team"]
SOURCES += ["prefix_index", "prefix_index_recovery", "prefix_index_sketch"]
SOURCES += ["prefix_index_bindings"]
XXHASH_SOURCES = ["bind_checksum", "checksum", "checksum_avx2"]
URING_SOURCES = ["bind_uring", "uring_device", "uring_loop", "mailbox", "hash_pool"]
XXHASH_PROBE = """
#define XXH_INLINE_ALL
#include <xxhash.h>
int main() { return static_cast<int>(XXH3_128bits("", 0).low64 & 1); }
"""
URING_PROBE = """
#include <liburing.h>
int main() { io_uring ring; return io_uring_queue_init(1, &ring, IORING_SETUP_CLAMP) > 0; }
"""


class Build(build_ext):
    """Looks which headers there are, and says what is left out without them."""

    def build_extensions(self) -> None:
        self.force = True  # a header may have come or gone since the last build
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
        super().build_extensions()

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


native = Pybind11Extension(
    "attnstore_vllm._native",
    [f"csrc/{name}.cpp" for name in SOURCES],
    depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
)

setup(ext_modules=[native], cmdclass={"build_ext": Build})
