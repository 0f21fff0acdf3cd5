# SPDX-License-Identifier: Apache-2.0
"""The environment that numbers depend on besides the settings: the machine, and the versions on
it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    facts["cores"] = len(os.sched_getaffinity(0))
    facts["cpu"] = _cpu()
    facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for package in ("vllm", "torch", "attnstore-vllm"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    facts["commit"] = commit.stdout.strip() if commit.returncode == 0 else None
    return facts


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
