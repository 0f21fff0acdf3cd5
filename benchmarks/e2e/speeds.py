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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.config.values import format_size
from attnstore_vllm.preflight import SHM_DIR, memory_available, shared_memory
from benchmarks.e2e.answers import NotHere, Tried, Wrong
from benchmarks.e2e.cases import Case
from benchmarks.e2e.serving import Deadline, Served, Setup
from benchmarks.hit_latency import Client
from benchmarks.server import Process
from benchmarks.throughput import OUTPUT_TOKENS, REQUESTS, one_round

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DEFAULT: Final = Case()
EAGER: Final = Case(("--enforce-eager",))
DUMMIES: Final = ("--load-format", "dummy")
PROMPTS_IN_HBM: Final = 2.5
"""So many of the longest that are asked; the others wait in DRAM."""
DECODED: Final = 3_000
"""Tokens of one answer of those who generate meanwhile."""
DRAM_OF_FREE: Final = 0.7
SPARE_BYTES: Final = 64 << 20
SHARE_OF_HBM: Final = 0.45
"""The share of the GPU's memory that each of two servers at a time gets."""
GOALS: Final[dict[str, tuple[float, bool]]] = {
    "dram_over_hbm": (1.10, True),
    "throughput": (0.98, False),
    "bandwidth": (0.90, False),
    "slowdown_percent": (3.0, True),
}
"""(goal, whether it is the most that may be)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number; `kind` is a key of GOALS if something is to be reached."""

    name: str
    value: float
    kind: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        goal, at_most = GOALS.get(self.kind, (None, False))
        is_met = None
        if goal is not None:
            is_met = self.value <= goal if at_most else self.value >= goal
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "kind": self.kind,
            "goal": goal,
            "goal_is": "at most" if at_most else "at least",
            "is_met": is_met,
            "detail": self.detail,
        }


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

    def hits(self, deadline: Deadline, tried: Tried) -> list[Figure]:
        """TTFT of a hit in DRAM over one in HBM, which follows it at once; prompts by turns, more
        of them than HBM has room for."""
        size = self.setup.size
        longest = max(size.hits)
        decoding = size.decoders * (DECODED + 100)
        hbm = int(PROMPTS_IN_HBM * longest) + decoding + size.block
        most = max(self._count(tokens, hbm) * tokens for tokens in size.hits)
        dram = int(1.2 * (most + 2 * decoding) * size.timed.kv_bytes_per_token) + SPARE_BYTES
        free = min(shared_memory(SHM_DIR).free_bytes, memory_available())
        if dram > DRAM_OF_FREE * free:
            raise NotHere(
                f"{format_size(dram)} of shared memory are needed, and {format_size(free)} are free"
            )
        settings = {"dram": str(dram), "eviction": "lru"}
        store = self.setup.work / "hits-store"
        shutil.rmtree(store, ignore_errors=True)
        figures = []
        with self.setup.serve(
            "hits",
            self._case(),
            deadline,
            store=store,
            hbm=hbm,
            extra=DUMMIES,
            settings=settings,
            model=self._model(),
            model_len=longest + 256 if longest > DECODED else DECODED + 256,
        ) as served:
            tried.facts = served.facts()
            for decoders in (0, size.decoders):
                with _decoding(served, decoders, size.timed.vocab) as gaps:
                    for tokens in size.hits:
                        figures.append(self._hit(served, tokens, hbm, decoders, gaps))
            tried.complaints = served.complaints()
        shutil.rmtree(store, ignore_errors=True)
        return figures

    @staticmethod
    def _count(tokens: int, hbm: int) -> int:
        """So many prompts that the one asked longest ago is not in HBM any more."""
        return hbm // tokens + 2

    def _hit(self, served: Served, tokens: int, hbm: int, decoders: int, gaps: _Gaps) -> Figure:
        size, random = self.setup.size, Random(f"{tokens} {decoders}")
        length = tokens // size.block * size.block + 1  # every hit leaves one token to compute
        count = self._count(tokens, hbm)
        prompts = [
            [random.randrange(300, size.timed.vocab - 10) for _ in range(length)]
            for _ in range(count)
        ]
        times: dict[str, list[float]] = {"computed": [], "DRAM": [], "HBM": []}
        pauses: dict[str, list[float]] = {"DRAM": [], "HBM": []}
        times["computed"] = [Client(served.server).ttft_ms(prompt) for prompt in prompts]
        before = served.loaded()["dram"]
        rounds = max(1, size.rounds * 4 // count)
        for _ in range(rounds):
            for prompt in prompts:
                for kind in ("DRAM", "HBM"):
                    gaps.clear()
                    times[kind].append(Client(served.server).ttft_ms(prompt))
                    pauses[kind] += gaps.seen_ms()
        loaded = served.loaded()["dram"] - before
        found = loaded / (rounds * count * (length - 1))
        if found < 0.95:
            raise Wrong(f"{tokens} tokens: {found:.0%} of them were hits in DRAM")
        medians = {kind: round(statistics.median(ms), 2) for kind, ms in times.items()}
        beside = f" beside {decoders} that generate" if decoders else ""
        detail = {
            "ttft_ms": medians,
            "hits": rounds * count,
            "of_dram": round(found, 3),
            "all_ms": {kind: [round(v, 2) for v in ms] for kind, ms in times.items()},
            "decoders": decoders,
            "tokens": tokens,
        }
        if all(pauses.values()):
            detail["step_ms"] = {k: round(statistics.mean(v), 3) for k, v in pauses.items()}
        ratio = statistics.median(times["DRAM"]) / statistics.median(times["HBM"])
        return Figure(
            f"DRAM hit over HBM hit, {tokens} tokens{beside}", ratio, "dram_over_hbm", detail
        )

    # ---- throughput ----------------------------------------------------------------------

    def throughput(self, deadline: Deadline, tried: Tried) -> list[Figure]:
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
        case = self._case()
        with (
            self.setup.serve(
                "throughput", case, deadline, store=store, settings={"dram": str(dram)}, **common
            ) as ours,
            self.setup.serve("throughput-reference", case, deadline, **common) as plain,
        ):
            sides = [("store", ours.server), ("plain", plain.server)]
            speeds: dict[str, list[float]] = {"store": [], "plain": []}
            for number in range(2 * size.rounds + 1):
                for side, server in sides:
                    speed = one_round(server, random, size.throughput_prompt)
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
        return [Figure(name, statistics.median(ratios), "throughput", detail)]

    # ---- copies ----------------------------------------------------------------------------

    def copies(self, deadline: Deadline, tried: Tried) -> list[Figure]:
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
        return list(of_copies(rows))


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


# ---- requests that generate meanwhile --------------------------------------------------------


class _Gaps:
    """Milliseconds between the tokens of one stream."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._lock = threading.Lock()

    def came(self) -> None:
        with self._lock:
            self._times.append(time.perf_counter())

    def clear(self) -> None:
        with self._lock:
            self._times = self._times[-1:]

    def seen_ms(self) -> list[float]:
        with self._lock:
            times = list(self._times)
        return [1000 * (b - a) for a, b in pairwise(times)]


@contextmanager
def _decoding(served: Served, count: int, vocab: int) -> Iterator[_Gaps]:
    """So many requests generate until the block is left; the first one's tokens are timed."""
    gaps, stop, random = _Gaps(), threading.Event(), Random(7)

    def generate(first: bool, prompt: list[int]) -> None:
        with suppress(OSError, HTTPException):  # the one that asks for hits says what happened
            while not stop.is_set():
                for _ in served.stream(prompt, DECODED):
                    if first:
                        gaps.came()
                    if stop.is_set():
                        return

    threads = [
        threading.Thread(
            target=generate,
            daemon=True,
            args=(i == 0, [random.randrange(300, vocab - 10) for _ in range(64)]),
        )
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0 if threads else 0.0)
    try:
        yield gaps
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
