# SPDX-License-Identifier: Apache-2.0
"""Builds attnstore_vllm._native; everything else about the package is in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

SOURCES = ["module", "page_copier", "copy_queue", "stream_copy"]
SOURCES += ["prefix_index", "prefix_index_recovery", "prefix_index_sketch"]
SOURCES += ["prefix_index_bindings"]

native = Pybind11Extension(
    "attnstore_vllm._native",
    [f"csrc/{name}.cpp" for name in SOURCES],
    depends=sorted(glob("csrc/*.h")),
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
    extra_link_args=["-pthread"],
)

setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
