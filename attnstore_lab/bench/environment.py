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
    facts["commit"] = _git("rev-parse", "HEAD")
    facts["is_clean"] = _git("status", "--porcelain", "--untracked-files=no") == ""
    return facts


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
