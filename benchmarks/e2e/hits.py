# SPDX-License-Identifier: Apache-2.0
"""Times of hits: histories that wait in DRAM alone, then in HBM too, with new tokens behind them.

More histories than HBM has room for are asked in one circle, so that each has left HBM when its
turn comes. Each question has new tokens that were never asked before, so that the history alone is
found: of one new token a pass is a decode, of many the computing may hide the copies.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

from attnstore_vllm.config.values import format_size
from benchmarks.e2e.answers import NotHere, Wrong
from benchmarks.e2e.cases import Size
from benchmarks.e2e.figures import Figure
from benchmarks.e2e.serving import Served

NVME_OVER_DRAM: Final = 2.5
"""A smaller NVMe loses what is new beside a busy disk: it is then not DRAM that is timed."""
DISK_SPARE: Final = 2 << 30
PROMPTS_IN_HBM: Final = 1.5
"""So many of the longest histories; the others wait in DRAM."""
DECODED: Final = 3_000
"""Tokens of one answer of those who generate meanwhile."""
SPARE_BYTES: Final = 64 << 20
CHUNK_TOKENS: Final = 256
"""The tail of an answer takes a chunk."""
FOUND: Final = 0.95
"""The share of the histories' tokens that has to be found."""
COMPUTED: Final = 3
"""Histories whose first time counts as computed; the others are there to fill HBM."""
EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Room:
    """What the server of all hits of a size needs."""

    hbm: int
    """Tokens."""
    dram: int
    """Bytes."""
    model_len: int

    @classmethod
    def of(cls, size: Size) -> Room:
        longest = max(size.hits)
        decoding = size.decoders * (DECODED + 100)
        hbm = int(PROMPTS_IN_HBM * longest) + decoding + size.block
        histories = max(count(tokens, hbm) * tokens for tokens in size.hits)
        behind = size.pairs * sum(new + CHUNK_TOKENS for new in size.new)
        kept = int(1.1 * (histories + behind + decoding))
        dram = kept * size.timed.kv_bytes_per_token + SPARE_BYTES
        return cls(hbm, dram, max(longest + max(size.new), DECODED) + 256)


def count(tokens: int, hbm: int) -> int:
    """So many histories that the one asked longest ago is not in HBM any more."""
    return hbm // tokens + 2


def tiers(dram: int, directory: Path) -> tuple[dict[str, Any], str]:
    """Settings of a store whose DRAM is timed, and a line about them.

    Raises: NotHere if the disk has no room for NVME_OVER_DRAM.
    """
    nvme, free = int(NVME_OVER_DRAM * dram), shutil.disk_usage(directory).free
    if nvme + DISK_SPARE > free:
        raise NotHere(
            f"{format_size(nvme)} of NVMe, {NVME_OVER_DRAM:g} times DRAM, are needed, and "
            f"{directory} has {format_size(free)} free"
        )
    told = f"NVMe: {format_size(nvme)}, {NVME_OVER_DRAM:g} times DRAM"
    settings = {"dram": str(dram), "nvme": {"capacity": str(nvme)}}
    return settings, told


@dataclass(slots=True)
class Histories:
    """Those of one length, in their circle. Made by asking each once."""

    served: Served
    size: Size
    tokens: int
    """Whole blocks."""
    prompts: list[list[int]]
    computed_ms: list[float]
    random: Random
    _next: int = 0

    @classmethod
    def ask(cls, served: Served, size: Size, tokens: int, hbm: int, decoders: int) -> Histories:
        random = Random(f"{tokens} {decoders}")
        length = tokens // size.block * size.block
        prompts = [_some(random, size, length) for _ in range(count(tokens, hbm))]
        times = [served.ttft_ms([*prompt, 21]) for prompt in prompts]
        return cls(served, size, length, prompts, times[:COMPUTED], random)

    def time(self, new: int, decoders: int, gaps: Gaps) -> Figure:
        """Raises: Wrong if what was timed were no hits."""
        served, times = self.served, {"DRAM": list[float](), "HBM": list[float]()}
        pauses: dict[str, list[float]] = {"DRAM": [], "HBM": []}
        before = found(served)
        for _ in range(self.size.pairs):
            prompt = self.prompts[self._next % len(self.prompts)]
            self._next += 1
            ids = [*prompt, *_some(self.random, self.size, new)]
            for kind, took in times.items():
                gaps.clear()
                took.append(served.ttft_ms(ids))
                pauses[kind] += gaps.seen_ms()
        after = found(served)
        asked = self.size.pairs * self.tokens
        share = (after["found"] - before["found"]) / asked
        medians = {kind: round(statistics.median(ms), 2) for kind, ms in times.items()}
        loaded = {tier: after[tier] - before[tier] for tier in ("dram", "nvme")}
        detail: dict[str, Any] = {
            "ttft_ms": {"computed": round(statistics.median(self.computed_ms), 2), **medians},
            "tokens": self.tokens,
            "new": new,
            "decoders": decoders,
            "hits": self.size.pairs,
            "found": round(share, 3),
            "loaded_tokens": loaded,
            "all_ms": {kind: [round(v, 2) for v in ms] for kind, ms in times.items()},
        }
        if all(pauses.values()):
            detail["step_ms"] = {k: round(statistics.mean(v), 3) for k, v in pauses.items()}
        beside = f" beside {decoders} that generate" if decoders else ""
        name = f"DRAM hit over HBM hit, {self.tokens} tokens and {new} new{beside}"
        if share < FOUND or loaded["nvme"] > (1 - FOUND) * asked:
            raise Wrong(f"{name}: {share:.0%} of the history was found, {loaded}")
        ratio = statistics.median(times["DRAM"]) / statistics.median(times["HBM"])
        return Figure(name, ratio, "dram_over_hbm", detail)


def _some(random: Random, size: Size, length: int) -> list[int]:
    return [random.randrange(300, size.timed.vocab - 10) for _ in range(length)]


def found(served: Served) -> dict[str, int]:
    """Tokens found so far: by vLLM's own count, which any connector has; and loaded by the store,
    by tier."""
    loaded = served.loaded()  # counts come with the step after
    return {"found": served.counted(EXTERNAL_HITS), **loaded}


def time_hits(
    served: Served,
    size: Size,
    room: Room,
    decoders: int,
    got: Callable[[Figure], None],
    time_left: Callable[[], bool] = lambda: True,
) -> list[str]:
    """All lengths with all counts of new tokens; beside others that generate, with the fewest and
    the most. Each figure is handed over when it is there.

    Returns: what was no hit, and what was not timed since there was no time left.
    """
    asked_new = size.new if not decoders else (size.new[0], size.new[-1])
    missing = []
    with decoding(served, decoders, size.timed.vocab) as gaps:
        for tokens in size.hits:
            histories: Histories | None = None
            for new in asked_new:
                if not time_left():
                    missing.append(f"no time for {tokens} tokens and {new} new, {decoders} beside")
                    continue
                if histories is None:
                    histories = Histories.ask(served, size, tokens, room.hbm, decoders)
                try:
                    got(histories.time(new, decoders, gaps))
                except Wrong as wrong:  # another length may be right
                    missing.append(str(wrong))
    return missing


# ---- requests that generate meanwhile --------------------------------------------------------


@dataclass(slots=True)
class Gaps:
    """Milliseconds between the tokens of one stream."""

    _times: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
def decoding(served: Served, number: int, vocab: int) -> Iterator[Gaps]:
    """So many requests generate until the block is left; the first one's tokens are timed."""
    gaps, stop, random = Gaps(), threading.Event(), Random(7)

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
        for i in range(number)
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
