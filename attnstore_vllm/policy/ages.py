# SPDX-License-Identifier: Apache-2.0
"""Ages of runs, the hazard at each, and what a slot is worth by them. Pure."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NUM_AGES = 40
FIRST_S = 4.0
"""Clocks of traces tick every few seconds. In a shorter age what comes within one tick would look
like a high rate, and what has just come like the best to keep."""
EDGES_S = np.concatenate([[0.0], FIRST_S * 2.0 ** (np.arange(NUM_AGES) / 2)])
"""Age b is from EDGES_S[b] to EDGES_S[b + 1] seconds; the last ends after 34 days."""
WIDTHS_S = np.diff(EDGES_S)


def age_of(seconds: float) -> int:
    """The age, an index of WIDTHS_S."""
    return bisect_right(_BEGINNINGS_S, seconds)


def ages_of(seconds: Array) -> npt.NDArray[np.int64]:
    """age_of() of each."""
    return np.searchsorted(EDGES_S[1:-1], seconds, side="right")


_BEGINNINGS_S: list[float] = EDGES_S[1:-1].tolist()


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))


def hazard(returned: Array, waiting: Array, prior: Array, prior_runs: float) -> Array:
    """[..., age] the probability to return at an age, of those that had not before."""
    reached = np.cumsum((returned + waiting)[..., ::-1], axis=-1)[..., ::-1] - waiting / 2
    return (returned + prior_runs * prior) / (reached + prior_runs)


def gittins(p: Array, q: Array, rows: npt.NDArray[np.int64] | None = None) -> Array:
    """[row, age] the best ratio of returns to seconds, over all times to keep a slot.

    Args:
        p: [row] to return at all.
        q: [..., age] of those that do, to return at this age, if not before.
        rows: of q, for each of p. None: they are the same.
    """
    survival = np.cumprod(1 - q, axis=1)
    survival = np.concatenate([np.ones((len(q), 1)), survival], axis=1)
    if rows is not None:
        survival = survival[rows]
    alive = np.ascontiguousarray((1 - p[:, None] * (1 - survival)).T)  # [age, row]: long ones
    seconds = np.cumsum(WIDTHS_S[:, None] * (alive[1:] + alive[:-1]) / 2, axis=0)
    seconds = np.concatenate([np.zeros((1, len(p))), seconds])
    best = np.zeros((NUM_AGES, len(p)))
    for age in range(NUM_AGES):
        ratios = (alive[age] - alive[age + 1 :]) / (seconds[age + 1 :] - seconds[age])
        best[age] = ratios.max(axis=0)
    return np.ascontiguousarray(best.T)
