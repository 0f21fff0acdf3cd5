# SPDX-License-Identifier: Apache-2.0
"""Several runs of the same systems as one figure, with what it may differ by. Pure.

A session's turns depend on each other, so sessions are resampled and not requests. All systems of
a run are asked the same sessions: a ratio of two is taken of the same resample.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, Final

Record = Mapping[str, Any]
"""A line of --records."""
Sessions = Mapping[tuple[int, int], Sequence[float]]
"""By run and session: TTFT of turn 2 and later, in ms."""
RESAMPLES: Final = 2000
SHARE: Final = 0.95


def later_turns(runs: Iterable[Iterable[Record]]) -> dict[tuple[int, int], list[float]]:
    """Of one system's runs."""
    found: dict[tuple[int, int], list[float]] = {}
    for number, records in enumerate(runs):
        for record in records:
            if not record["warmup"] and record["error"] is None and record["turn"] > 1:
                found.setdefault((number, record["session"]), []).append(record["ttft_ms"])
    return found


def interval(of: Sessions, over: Sessions | None = None) -> tuple[float, float, float]:
    """The median, and between which two it lies in SHARE of the resamples of the sessions.

    Args:
        over: of another system; then of the ratio of both medians.
    Raises: ValueError without a session that both have.
    """
    names = sorted(of.keys() & over.keys()) if over is not None else sorted(of)
    if not names:
        raise ValueError("no session has a second turn that was answered")
    rng = Random(1)
    draws = (rng.choices(names, k=len(names)) for _ in range(RESAMPLES))
    found = sorted(_median(of, over, draw) for draw in draws)
    edge = int((1 - SHARE) / 2 * RESAMPLES)
    return _median(of, over, names), found[edge], found[-1 - edge]


def _median(of: Sessions, over: Sessions | None, names: Sequence[tuple[int, int]]) -> float:
    value = statistics.median(x for name in names for x in of[name])
    if over is None:
        return value
    return value / statistics.median(x for name in names for x in over[name])
