# SPDX-License-Identifier: Apache-2.0
"""Builds attnstore_vllm._native; everything else about the package is in pyproject.toml."""

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

native = Pybind11Extension(
    "attnstore_vllm._native",
    ["csrc/module.cpp", "csrc/copy_queue.cpp"],
    depends=["csrc/copy_queue.h"],
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
    extra_link_args=["-pthread"],
)

setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
