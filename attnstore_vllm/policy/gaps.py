# SPDX-License-Identifier: Apache-2.0
"""How long sessions stay away between two turns. Pure: time is given."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FIRST_S = 0.0625
NUM_AGES = 32
ENDS_S = FIRST_S * 2.0 ** (np.arange(NUM_AGES) / 2)
"""Age b ends after so long; the last after 48 minutes, and what is older never comes back."""
_ENDS_S: list[float] = ENDS_S.tolist()
WIDTHS_S = np.diff(np.concatenate([[0.0], ENDS_S]))
RETURNS_MIN = 8
"""Before so many have come back nothing is held."""
RETURNS_KEPT = 512
"""About so many count."""
REFIT_RETURNS = 16


class Gaps:
    """How long sessions are away, of all that have left: those that never came back count."""

    def __init__(self) -> None:
        self._returned = np.zeros(NUM_AGES)
        self._departed = 0.0
        self._num_seen = 0
        self.returned = np.zeros(NUM_AGES), np.cumsum(WIDTHS_S, dtype=np.float64)
        """By age: the probability that a session is back by its end, and the seconds that it is
        away until then."""
        self._rates: list[float] = [0.0] * NUM_AGES
        self.is_known = False

    def observe(self, gap_s: float) -> bool:
        """A session has come back. Returns whether it is time for fit()."""
        age = bisect_right(_ENDS_S, gap_s)
        keep = 1 - 1 / RETURNS_KEPT
        self._returned *= keep
        self._departed *= keep
        if age < NUM_AGES:
            self._returned[age] += 1
        else:
            self._departed += 1
        self._num_seen += 1
        return self._num_seen >= RETURNS_MIN and self._num_seen % REFIT_RETURNS in (0, RETURNS_MIN)

    def gave_up(self) -> None:
        """One that was followed has not come back."""
        self._departed += 1

    def fit(self, away_s: Array) -> None:
        """Learn the hazard of each age. Cost: some array operations, none of them in Python for
        each session.

        Args:
            away_s: how long each session is away that has not come back yet.
        """
        ages = np.searchsorted(ENDS_S, away_s, side="right")
        by_age = np.bincount(ages, minlength=NUM_AGES + 1)
        reached = by_age[::-1].cumsum()[::-1][1:]
        later = np.cumsum(self._returned[::-1])[::-1] + self._departed
        at_risk = later + reached
        hazard = np.divide(self._returned, at_risk, where=at_risk > 0, out=np.zeros(NUM_AGES))
        # Row a is of a session that has reached age a.
        is_ahead = np.triu(np.ones((NUM_AGES, NUM_AGES), dtype=bool))
        stays = np.cumprod(np.where(is_ahead, 1 - hazard, 1.0), axis=1)
        before = np.concatenate([np.ones((NUM_AGES, 1)), stays[:, :-1]], axis=1)
        # One that comes back within an age comes in its middle.
        away = np.cumsum(np.where(is_ahead, WIDTHS_S * (before + stays) / 2, 0.0), axis=1)
        rates = np.divide(1 - stays, away, where=is_ahead, out=np.zeros_like(away))
        self.returned = 1 - stays[0], away[0]
        self._rates = rates.max(axis=1).tolist()
        self.is_known = True

    def rate(self, age_s: float) -> float:
        """Returns a second of one that is away for so long, over the best time to wait."""
        return self._rates[min(bisect_right(_ENDS_S, age_s), NUM_AGES - 1)]
