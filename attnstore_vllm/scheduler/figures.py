# SPDX-License-Identifier: Apache-2.0
"""Figures: counts of a step; the store's own, and who takes them: each step, or the board while no
step is planned; and what they say to a reader of the log."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from attnstore_vllm.config.values import format_size
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.board import PERIOD_S, Board
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import AUDITS, ERRORS, NVME, PEERS, SHARED, Event, Flow

ERROR_EVENTS = frozenset(ERRORS)
_METRIC_OF: dict[str, str] = {
    **dict.fromkeys(ERRORS, "errors"),
    **dict.fromkeys(AUDITS, "audits"),
}
"""The metric of events of Residency.counts; `chunks` has the others."""


class StepStats:
    """`data`: {"counters": {"name:label": n}, "gauges": {"name:label": [when, n]}, "observed":
    {"name" or "name:label": [n, ...]}}. `when`: seconds of the engine's steady clock.

    A plain dict of strings and numbers, because it crosses processes. connector/metrics.py has
    what they mean.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "gauges": {}, "observed": {}}

    def add(self, name: str, label: str, amount: float) -> None:
        if amount:
            counters = self.data["counters"]
            counters[f"{name}:{label}"] = counters.get(f"{name}:{label}", 0) + amount

    def set(self, name: str, label: str, value: float, now: float) -> None:
        self.data["gauges"][f"{name}:{label}"] = [now, value]

    def observe(self, name: str, value: float, label: str = "") -> None:
        key = f"{name}:{label}" if label else name
        self.data["observed"].setdefault(key, []).append(value)


class GroupCounts:
    """Figures by kind of KV cache group (index/sections.py: Reach), of models with several: of
    others they say nothing."""

    def __init__(self, geometry: Geometry) -> None:
        self._kinds = [group.reach for group in geometry.groups]
        self._block_bytes = geometry.all_block_bytes
        self._counts = Counter[tuple[str, str]]()

    def add(self, name: str, group: int, amount: float) -> None:
        """Args: group: its place in the geometry."""
        if len(self._kinds) > 1:
            self._counts[name, self._kinds[group]] += int(amount)

    def add_blocks(self, name: str, group: int, num_blocks: int) -> None:
        """The bytes of so many blocks, on all ranks."""
        self.add(name, group, num_blocks * self._block_bytes)

    def move_to(self, stats: StepStats) -> None:
        """Add to `stats` what was counted since the last call."""
        for (name, kind), amount in self._counts.items():
            stats.add(name, kind, amount)
        self._counts.clear()


class StoreFigures:
    """The store's own counts and gauges, as differences. From any thread.

    Args:
        token_bytes: KV bytes of a token, all ranks.
        info: labels of the metric of that name.
    """

    def __init__(self, store: Store, token_bytes: float, info: tuple[str, ...] = ()) -> None:
        self._store = store
        self._token_bytes = token_bytes
        self._info = {("info", "|".join(info)): 1.0} if info else {}
        self._reported: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self.taken_at = time.monotonic()
        """When it was last asked for."""
        self._looked_at = -math.inf
        """When gauges were last asked for."""

    def add_to(self, stats: StepStats) -> None:
        """Add what has changed since the last call; of gauges, once in PERIOD_S."""
        with self._lock:
            now = self.taken_at = time.monotonic()
            figures = self._store.figures()
            totals: dict[tuple[str, str], float] = {
                **{
                    (_METRIC_OF.get(event, "chunks"), event): n
                    for event, n in figures.counts.items()
                },
                **{("bytes", flow.value): n for flow, n in figures.moved_bytes.items()},
                ("first_written_bytes", NVME): int(
                    figures.first_written_tokens * self._token_bytes
                ),
            }
            for (name, label), total in totals.items():
                more = total - self._reported.get((name, label), 0)
                if more:
                    stats.add(name, label, more)
            self._reported.update(totals)
            if now - self._looked_at >= PERIOD_S:
                self._looked_at = now
                for (name, label), value in (self._store.gauges() | self._info).items():
                    if self._reported.get((name, label)) != value:
                        self._reported[name, label] = value
                        stats.set(name, label, value, now)
            for name, values in figures.seconds.items():
                for value in values:
                    stats.observe(name, value)


def in_words(data: Mapping[str, Any]) -> str:
    """One line for the log. `data` is that of StepStats, over the time since the last line."""
    return "; ".join(_parts(data["counters"], data["observed"])) or "nothing was asked for"


def _parts(counters: Mapping[str, float], observed: Mapping[str, list[float]]) -> Iterator[str]:
    def of(name: str) -> dict[str, float]:
        found = (key.partition(":") for key in counters)
        return {label: counters[f"{n}:{label}"] for n, _, label in found if n == name}

    prompts = of("prompt_tokens")
    if total := sum(prompts.values()):
        names = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}
        extra = {PEERS: "siblings", SHARED: "shared"}
        names |= {source: name for source, name in extra.items() if prompts.get(source)}
        names["computed"] = "computed"
        shares = (f"{name} {prompts.get(s, 0) / total:.0%}" for s, name in names.items())
        yield f"{total:,.0f} prompt tokens: {', '.join(shares)}"
    if saved := sum(of("prefill_seconds_saved").values()):
        yield f"{saved:,.1f} s of prefill saved"
    if waits := observed.get("wait_seconds"):
        yield f"{len(waits)} waited for NVMe, {1000 * max(waits):,.0f} ms at most"
    if causes := of("recomputations"):
        why = ", ".join(f"{n:,.0f} {cause}" for cause, n in sorted(causes.items()))
        yield f"computed though stored: {why}"
    chunks, moved = of("chunks"), of("bytes")
    if saved_chunks := chunks.get(Event.SAVED, 0):
        yield f"{saved_chunks:,.0f} chunks kept"
    if written := moved.get(Flow.WRITE_BACK.value, 0):
        yield f"{format_size(int(written))} written to NVMe"
    if lost := chunks.get(Event.DROPPED, 0) + chunks.get(Event.LOST, 0):
        yield f"{lost:,.0f} chunks had no room"
    if errors := of("errors"):
        yield "ERRORS: " + ", ".join(f"{n:,.0f} {kind}" for kind, n in sorted(errors.items()))


class IdleFigures:
    """A thread that writes to the board what changes while no step is planned."""

    def __init__(self, figures: StoreFigures, board: Board) -> None:
        self._figures = figures
        self._board = board
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attnstore-figures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._board.close()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            if time.monotonic() - self._figures.taken_at < PERIOD_S:
                continue
            stats = StepStats()
            self._figures.add_to(stats)
            if any(stats.data.values()):
                self._board.write(stats.data)
