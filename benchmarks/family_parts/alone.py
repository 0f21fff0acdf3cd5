# SPDX-License-Identifier: Apache-2.0
"""Each family's engine in a process of its own, with the environment that vLLM reads at import."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}
T = TypeVar("T")


def measured(
    names: Sequence[str], measure: Callable[..., T], *arguments: Any, out: Path | None
) -> dict[str, T]:
    """What `measure(name, *arguments)` returns of each, one after the other; also written to `out`
    as JSON. Raises what it raises."""
    found: dict[str, T] = {}
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name} ...", flush=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=_prepare) as pool:
            found[name] = pool.submit(measure, name, *arguments).result()
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _prepare() -> None:
    os.environ.update(ENVIRONMENT)
