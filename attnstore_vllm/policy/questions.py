# SPDX-License-Identifier: Apache-2.0
"""When a tier that must be asked is asked for a request, and how long the request waits for it.
Pure."""

from __future__ import annotations

ASK_MIN_TOKENS = 32
"""Fewer tokens that are not stored here are computed without a question."""
ASKED_FOR_S = 2.0
"""After so long a request that still waits may ask again: what was found may have gone."""
ANSWERS_KEPT = 64
"""About so many answers make up the mean."""


class AnswerTime:
    """The usual time of an answer, in seconds."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._count = 0

    def observe(self, seconds: float) -> None:
        self._count = min(self._count + 1, ANSWERS_KEPT)
        self.mean_s += (seconds - self.mean_s) / self._count


def worth_asking(num_tokens: int, computing_s: float | None, answer_s: float) -> bool:
    """Whether so many tokens that are not stored here are worth a question.

    Args:
        computing_s: that computing them takes; None: it is not known.
        answer_s: that an answer usually takes, before anything is loaded.
    """
    return num_tokens >= ASK_MIN_TOKENS and (computing_s is None or computing_s > answer_s)
