# SPDX-License-Identifier: Apache-2.0
"""The store's own figures, and who takes them: each step, or the board while no step is planned."""

from __future__ import annotations

import threading
import time

from attnstore_vllm.scheduler.messages import StepStats
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.board import PERIOD_S, Board
from attnstore_vllm.types import NVME

ERROR_EVENTS = frozenset({"read_failed", "write_failed", "corrupt", "device_late", "device_out"})
"""Events of Residency.counts that the metric `errors` has; `chunks` has the others."""


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
        """When somebody last asked."""

    def add_to(self, stats: StepStats) -> None:
        """Add what has changed since the last call."""
        with self._lock:
            self.taken_at = time.monotonic()
            figures = self._store.figures()
            totals: dict[tuple[str, str], float] = {
                **{(_metric_of(event), event): n for event, n in figures.counts.items()},
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
            for (name, label), value in (figures.gauges | self._info).items():
                if self._reported.get((name, label)) != value:
                    self._reported[name, label] = value
                    stats.set(name, label, value)
            for name, values in self._store.take_seconds().items():
                for value in values:
                    stats.observe(name, value)


def _metric_of(event: str) -> str:
    return "errors" if event in ERROR_EVENTS else "chunks"


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
