# SPDX-License-Identifier: Apache-2.0
"""What the parts have in common: their settings, their results, and engines in processes."""

from __future__ import annotations

import glob
import importlib.util
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from attnstore_lab.testing.tiny_model import MEDIUM, SMALL
from tests.vllm import host
from tests.vllm.engine import EngineSpec

SHAPES = {"8 layers": SMALL, "24 layers": MEDIUM}
BLOCK_TOKENS = 128
LONGEST_CALL_S = 900.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How long a part may take.

    Args:
        work: a directory that is there as long as the part runs.
        quick: a few rounds of small sizes, to see that it works; the figures say nothing.
    """

    work: Path
    quick: bool

    def rounds(self, usual: int) -> int:
        return 2 if self.quick else usual


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the last table."""

    what: str
    value: float
    goal: str
    detail: str = ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": round(statistics.median(values), 3),
        "quartiles": [round(quarters[0], 3), round(quarters[2], 3)],
        "rounds": len(values),
    }


def model_threads(cores: Sequence[int]) -> dict[str, str]:
    """The environment of a process in which a model runs on these processors.

    What vLLM sets for its own workers; with the engine in one process it sets nothing. Each thread
    has a processor of its own: where they may choose, two of them wake up on one again and again.
    """
    preloaded = [found for name in ("libgomp", "libtcmalloc") for found in _libraries(name)]
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "GOMP_CPU_AFFINITY": " ".join(map(str, cores)),
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }


def _libraries(name: str) -> list[str]:
    """The one that PyTorch or vLLM brings along, if any."""
    folders = []
    for package, places in (("torch", ("lib", "../torch.libs")), ("vllm", ("libs",))):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folders += [Path(spec.origin).parent / place for place in places]
    return [file for folder in folders for file in glob.glob(f"{folder}/{name}*.so*")][:1]


class Host(host.EngineHost):
    """An engine in a process of its own, whose environment is there from its first moment:
    OpenMP reads it when it is loaded."""

    def __init__(self, spec: EngineSpec, log: Path, environment: dict[str, str]) -> None:
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.dict(host.ENVIRONMENT, environment),
        ):
            super().__init__(spec, log, call_deadline_s=LONGEST_CALL_S)

    def __enter__(self) -> Host:
        return self
