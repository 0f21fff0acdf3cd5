# SPDX-License-Identifier: Apache-2.0
"""Are two answers the same but for rounding?

Sums in bf16 depend on how a prompt was split and on who was in the same batch. What they may
differ by is measured between runs without the store, never assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

CANDIDATES = 5
"""That an answer names for each position."""
LogProbs = tuple[tuple[int, float], ...]
"""(token, log-probability) of the candidates for one position, best first."""
MARGIN = 2.0
"""The run that is judged has more positions than the ones that were measured."""
FLOOR = 0.125
"""Nats: one step of a bf16 logit between 16 and 32, where the best ones are."""


class Answer(Protocol):
    """The part of an answer that is compared."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[LogProbs]: ...


def drift(a: Answer, b: Answer) -> float:
    """The largest difference of a candidate's log-probability, in nats.

    Positions count up to the first token that differs: there both have still read the same
    text, so that the candidates have to agree, whatever was drawn or which was best.
    """
    largest = 0.0
    for i, (here, there) in enumerate(zip(a.logprobs, b.logprobs, strict=False)):
        largest = max(largest, _apart(here, there), _apart(there, here))
        if a.tokens[i] != b.tokens[i]:
            break
    return largest


def _apart(a: LogProbs, b: LogProbs) -> float:
    """Over the candidates of `a`. One that `b` does not name has less there than its best ones.

    The token that was drawn is named too, however unlikely it was: it bounds nothing.
    """
    found = dict(b)
    if any(math.isnan(p) for _, p in a):
        return math.inf  # max() would pass over it
    least = min(sorted(found.values())[-CANDIDATES:])
    apart = (abs(p - found[t]) if t in found else max(0.0, p - least) for t, p in a)
    return max(apart, default=0.0)


def bound(measured: Iterable[float]) -> float:
    """The largest drift that is put down to rounding."""
    return MARGIN * max(FLOOR, max(measured, default=0.0))


def beyond(pairs: Sequence[tuple[Answer, Answer]], limit: float) -> list[int]:
    """Indices of the pairs that differ by more than rounding."""
    return [i for i, (a, b) in enumerate(pairs) if drift(a, b) > limit]
