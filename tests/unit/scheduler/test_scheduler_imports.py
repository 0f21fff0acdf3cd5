# SPDX-License-Identifier: Apache-2.0
"""The request's brain runs where neither vLLM nor torch is: the simulator drives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attnstore_vllm.scheduler

BLOCKED = """
import importlib, sys
for name in ("vllm", "torch"):
    sys.modules[name] = None
for name in sys.argv[1:]:
    importlib.import_module("attnstore_vllm.scheduler." + name)
print("all")
"""


def test_it_needs_neither_vllm_nor_torch() -> None:
    modules = [file.stem for file in Path(attnstore_vllm.scheduler.__path__[0]).glob("*.py")]
    assert "scheduler" in modules
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *modules], capture_output=True, text=True, check=False
    )
    assert done.stdout == "all\n", done.stderr
