# SPDX-License-Identifier: Apache-2.0
"""Hits over those in HBM, alone and beside others; throughput; and the copies' own figures.

The model is of 8B size, its weights are dummies, and everything that is compared is measured by
turns on one machine. With the CPU build the figures say only that all of it runs.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.config.values import format_size
from attnstore_vllm.preflight import SHM_DIR, memory_available, shared_memory
from benchmarks.e2e.answers import NotHere, Tried, Wrong
from benchmarks.e2e.cases import Case
from benchmarks.e2e.figures import Figure
from benchmarks.e2e.hits import SPARE_BYTES, Room, tiers, time_hits
from benchmarks.e2e.serving import Deadline, Setup
from benchmarks.server import Process
from benchmarks.throughput import OUTPUT_TOKENS, REQUESTS

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DEFAULT: Final = Case()
EAGER: Final = Case(("--enforce-eager",))
DUMMIES: Final = ("--load-format", "dummy")
DRAM_OF_FREE: Final = 0.7
SHARE_OF_HBM: Final = 0.45
"""The share of the GPU's memory that each of two servers at a time gets."""
Got = Callable[[Figure], None]
"""Gets each figure when it is there, so that a case that fails keeps what it has."""


@dataclass(slots=True)
class Speeds:
    """The cases that measure."""

    setup: Setup
    small: bool

    def _model(self) -> Path:
        return make_model(self.setup.work / "timed", self.setup.size.timed, weights=False)

    def _case(self) -> Case:
        return EAGER if self.setup.is_cpu else DEFAULT  # compiling takes the CPU a minute

    # ---- hits ----------------------------------------------------------------------------

    def hits(self, deadline: Deadline, tried: Tried, got: Got) -> None:
        """TTFT of a hit in DRAM over one in HBM, which follows it at once; histories by turns, more
        of them than HBM has room for."""
        size = self.setup.size
        room = Room.of(size)
        free = min(shared_memory(SHM_DIR).free_bytes, memory_available())
        if room.dram > DRAM_OF_FREE * free:
            raise NotHere(
                f"{format_size(room.dram)} of shared memory are needed, and {format_size(free)} "
                "are free"
            )
        settings, told = tiers(room.dram, self.setup.work)
        store = self.setup.work / "hits-store"
        shutil.rmtree(store, ignore_errors=True)
        with self.setup.serve(
            "hits",
            self._case(),
            deadline,
            store=store,
            hbm=room.hbm,
            extra=DUMMIES,
            settings={**settings, "eviction": "lru"},
            model=self._model(),
            model_len=room.model_len,
        ) as served:
            tried.facts = [told, *served.facts()]
            for decoders in (0, size.decoders):
                tried.lacking += time_hits(served, size, room, decoders, got)
            tried.complaints = served.complaints()
        shutil.rmtree(store, ignore_errors=True)
        if tried.lacking:
            raise Wrong("; ".join(tried.lacking))

    # ---- throughput ----------------------------------------------------------------------

    def throughput(self, deadline: Deadline, tried: Tried, got: Got) -> None:
        """Two servers by turns; nothing is ever asked twice."""
        size, random = self.setup.size, Random(1)
        model, store = self._model(), self.setup.work / "throughput-store"
        shutil.rmtree(store, ignore_errors=True)
        extra: tuple[str, ...] = DUMMIES
        if not self.setup.is_cpu:
            extra += ("--gpu-memory-utilization", str(SHARE_OF_HBM))
        hbm = REQUESTS * (size.throughput_prompt + OUTPUT_TOKENS + size.block)
        common: dict[str, Any] = {
            "hbm": max(hbm, 4_096),
            "extra": extra,
            "model": model,
            "model_len": 4_096,
        }
        dram = 2 * hbm * size.timed.kv_bytes_per_token + SPARE_BYTES
        settings, told = tiers(dram, self.setup.work)
        case = self._case()
        with (
            self.setup.serve(
                "throughput", case, deadline, store=store, settings=settings, **common
            ) as ours,
            self.setup.serve("throughput-reference", case, deadline, **common) as plain,
        ):
            tried.facts = [told, *ours.facts()]
            sides = [("store", ours), ("plain", plain)]
            speeds: dict[str, list[float]] = {"store": [], "plain": []}
            for number in range(2 * size.rounds + 1):
                for side, served in sides:
                    speed = served.tokens_per_s(random, size.throughput_prompt)
                    if number:  # the first warms up
                        speeds[side].append(speed)
                sides.reverse()
            tried.complaints = ours.complaints()
            loaded = sum(ours.loaded().values())
        shutil.rmtree(store, ignore_errors=True)
        if loaded:
            raise Wrong(f"{loaded} tokens were loaded, though nothing was asked twice")
        ratios = [a / b for a, b in zip(speeds["store"], speeds["plain"], strict=True)]
        detail = {
            "tokens_per_s": {k: round(statistics.median(v), 1) for k, v in speeds.items()},
            "ratios": [round(ratio, 4) for ratio in ratios],
        }
        name = "Throughput with nothing reused, over no store"
        got(Figure(name, statistics.median(ratios), "throughput", detail))

    # ---- copies ----------------------------------------------------------------------------

    def copies(self, deadline: Deadline, tried: Tried, got: Got) -> None:
        """benchmarks.gpu_check has them; its rows are read."""
        if self.setup.is_cpu:
            raise NotHere("needs a GPU")
        out, log = self.setup.work / "gpu_check.json", self.setup.work / "gpu_check.log"
        runner = str(ROOT / "tools" / "run_installed.py")
        command = [
            sys.executable,
            runner,
            "benchmarks.gpu_check",
            "--only",
            "bytes",
            "speed",
            "beside",
            "--out",
            str(out),
            *(["--small"] if self.small else []),
        ]
        process = Process(command, log)
        try:
            with deadline.watches(process):
                while process.exit_code is None:
                    time.sleep(0.2)
        finally:
            process.stop()
        if deadline.is_over or not out.exists():
            raise Wrong(f"gpu-check ended with {process.exit_code}: {process.log_tail()[-500:]}")
        rows = json.loads(out.read_text())["rows"]
        if wrong := [row["what"] for row in rows if row["is_wrong"]]:
            raise Wrong(f"gpu-check found wrong bytes: {wrong}")
        for figure in of_copies(rows):
            got(figure)


def of_copies(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """The rows of gpu-check that have a goal."""
    for row in rows:
        if row["goal"] is None or row["value"] is None:
            continue
        detail = {"how": row["how"], "detail": row["detail"]}
        if row["what"].startswith(("H2D ", "D2H ")):
            name = f"Bandwidth over one large copy, {row['what']}"
            yield Figure(name, row["value"], "bandwidth", detail)
        elif row["what"].startswith("slowdown "):
            yield Figure(f"Beside loads: {row['what']}", row["value"], "slowdown_percent", detail)
