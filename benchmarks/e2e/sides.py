# SPDX-License-Identifier: Apache-2.0
"""Servers beside each other, as many as the machine has memory for."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnstore_vllm.config.values import format_size
from benchmarks.e2e.cases import Case
from benchmarks.e2e.serving import Deadline, Served, Setup


@dataclass(frozen=True, slots=True)
class Need:
    """What a server takes of the machine, in bytes."""

    hbm: int
    """Memory, on the CPU build."""
    shm: int

    def __add__(self, other: Need) -> Need:
        return Need(self.hbm + other.hbm, self.shm + other.shm)

    def fits(self, room: Need) -> bool:
        return self.hbm <= room.hbm and self.shm <= room.shm

    def __str__(self) -> str:
        return f"{format_size(self.hbm)} and {format_size(self.shm)} of shared memory"


@dataclass(frozen=True, slots=True)
class Planned:
    """A server that is to be started."""

    name: str
    case: Case
    need: Need
    how: dict[str, Any]
    """Arguments of Setup.serve."""


def waves(
    groups: Sequence[Sequence[Planned]], room: Need
) -> tuple[list[list[Planned]], list[Planned]]:
    """Servers that run side by side, wave after wave: all at once if they fit, else each group in
    as few waves as its order allows.

    Returns: the waves, and the servers that do not fit alone.
    """
    too_large = [one for group in groups for one in group if not one.need.fits(room)]
    groups = [[one for one in group if one.need.fits(room)] for group in groups]
    every = [one for group in groups for one in group]
    if _sum(every).fits(room):
        return [every] if every else [], too_large
    found: list[list[Planned]] = []
    for group in groups:
        wave: list[Planned] = []
        for one in group:
            if wave and not _sum([*wave, one]).fits(room):
                found.append(wave)
                wave = []
            wave.append(one)
        if wave:
            found.append(wave)
    return found, too_large


def _sum(servers: Sequence[Planned]) -> Need:
    return sum((one.need for one in servers), Need(0, 0))


class Side:
    """A server that starts, runs and ends in a thread of its own, beside others."""

    def __init__(self, setup: Setup, planned: Planned, deadline: Deadline, name: str) -> None:
        """Args: name: of its log."""
        self.seconds = 0.0
        """Of its start."""
        self._setup, self._planned, self._deadline, self._name = setup, planned, deadline, name
        self._served: Served | None = None
        self._error: Exception | None = None
        self._is_decided, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began, planned = time.monotonic(), self._planned
        try:
            with self._setup.serve(
                self._name, planned.case, self._deadline, **planned.how
            ) as self._served:
                self.seconds = time.monotonic() - began
                self._is_decided.set()
                self._is_over.wait()
        except Exception as error:  # get() raises it
            self._error = error
        self._is_decided.set()

    def get(self) -> Served:
        """Wait until it is up, or its deadline has ended it. Raises: what its start has raised."""
        self._is_decided.wait()
        if self._error is not None:
            raise self._error
        assert self._served is not None
        return self._served


def stop(sides: Mapping[str, Side]) -> None:
    """All at once; returns when they are gone."""
    for side in sides.values():
        side._is_over.set()
    for side in sides.values():
        side._thread.join()
