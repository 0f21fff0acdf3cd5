# SPDX-License-Identifier: Apache-2.0
"""The distance up to which stored KV may differ from what is computed, learned from rounding. Pure.

Rounding is what pairs show of which one process computed both. How large it is depends on the
model, its types and the batches that come, so it is not known before. Until enough pairs were seen
the bound is that of a model which is not known (kv_compare.BOUND), and it never is wider.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from attnstore_vllm.policy.kv_compare import BOUND

PAIRS: Final = 32
"""Chunks that are to be seen first."""
FACTOR: Final = 8
"""The bound over the largest distance that was seen. Another start may compile the model otherwise,
and a crowd that has not come yet may round more."""
LEAST: Final = 0.1
"""No bound is smaller. bfloat16 rounds by 0.004, many times on the way through a model."""
PAIRS_MAX: Final = 2**53
STEP: Final = 0.05
"""Bounds differ by so much, so that few are ever new."""


class LearnedBound(NamedTuple):
    """The bound of one KV cache group."""

    pairs: int = 0
    largest: float = 0.0
    """The largest distance of these pairs."""

    @property
    def value(self) -> float:
        if self.pairs < PAIRS:
            return BOUND
        steps = math.ceil(FACTOR * self.largest / STEP - 1e-9)
        return min(BOUND, max(LEAST, round(steps * STEP, 9)))

    def and_one(self, distance: float, *, is_new: bool = True) -> LearnedBound:
        """With one more pair, that agreed.

        Args:
            is_new: of a chunk that was not seen yet: PAIRS of one would say nothing of others.
        """
        return LearnedBound(self.pairs + is_new, max(self.largest, distance))


def bounds_from(found: object, num_groups: int) -> list[LearnedBound]:
    """Bounds that as_json() wrote. Of anything else nothing is known."""
    known = found if isinstance(found, list) and len(found) == num_groups else []
    bounds = []
    for item in known:
        match item:
            case [int(pairs), (int() | float()) as largest] if (
                0 <= pairs < PAIRS_MAX and 0 <= largest <= BOUND
            ):
                bounds.append(LearnedBound(pairs, float(largest)))
            case _:
                return [LearnedBound()] * num_groups
    return bounds or [LearnedBound()] * num_groups


def as_json(bounds: list[LearnedBound]) -> list[list[float]]:
    return [[one.pairs, one.largest] for one in bounds]
