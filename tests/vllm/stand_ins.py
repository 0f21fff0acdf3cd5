# SPDX-License-Identifier: Apache-2.0
"""Packages that vLLM imports with some models, and that a model of text alone never calls; and one
that its CPU build stumbles over."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ANYTHING = """\
__version__ = "0.0.0"


class Nothing:
    BICUBIC = BILINEAR = NEAREST = NEAREST_EXACT = LANCZOS = BOX = HAMMING = RGB = None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
"""
MODULES = (
    "",
    "io",
    "transforms",
    "transforms/functional",
    "transforms/v2",
    "transforms/v2/functional",
)


def stand_in_for_torchvision(directory: Path) -> None:
    """Where there is none: an empty one, for this process and those that it starts."""
    if find_spec("torchvision") is not None:
        return
    for name in MODULES:
        file = directory / "torchvision" / name / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ANYTHING, encoding="utf-8")
    sys.path.append(str(directory))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(directory)])
    )


def let_vllm_pass_numba() -> None:
    """vLLM's CPU build asks every object of every module for its `__dict__`, and ends over that of
    llvmlite's library, which is none. numba imports it, and LMCache numba. In this process it has
    one from now on, an empty one."""
    if find_spec("llvmlite") is not None:
        from llvmlite.binding import ffi  # type: ignore[import-untyped]

        ffi.lib._fntab["__dict__"] = {}
