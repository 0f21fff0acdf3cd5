# SPDX-License-Identifier: Apache-2.0
"""Is stored KV what was computed once more? Pure: two slots of bytes, compared layer by layer.

Bit for bit where a computation gives the same bits however its batch is made up. Elsewhere rounding
differs from batch to batch, and the *distance* counts: of K and of V, a layer and a head,

    |stored - computed| / max(|stored|, |computed|)        the root of the sums of squares, over
                                                           all tokens that are compared

0: they are equal; 1.4: they have nothing to do with each other. A head of next to no weight counts
as one of FLOOR of its layer's mean, so that rounding beside large heads makes no distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
"""[tokens, heads, dim]: the place of each number of K or V within a page, in numbers."""
_Floats = npt.NDArray[np.float32]

BOUND: Final = 0.5
"""The distance up to which a difference may be rounding."""
FLOOR: Final = 0.01
NUMBER_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Types of KV whose distance is known."""


class Unit(NamedTuple):
    """A layer's pages of one rank, in a slot."""

    rank: int
    layer: int
    at: int
    """Its first byte."""
    page_bytes: int
    """That a block has."""

    def within(self, blocks: range) -> slice:
        """The bytes of these blocks."""
        first = self.at + blocks.start * self.page_bytes
        return slice(first, first + len(blocks) * self.page_bytes)


class Difference(NamedTuple):
    """The place where the two differ most, of the first layer that differs."""

    rank: int
    layer: int
    side: str
    """K or V; empty where bits are compared."""
    head: int
    """-1 where bits are compared."""
    distance: float
    """Infinite where bits are compared, or where just one of the two is no number."""

    def __str__(self) -> str:
        where = f"rank {self.rank}, layer {self.layer}"
        if not self.side:
            return f"{where}: other bits"
        return f"{where}, {self.side} of head {self.head}: distance {self.distance:.2g}"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where the numbers of K and V are in a page."""

    dtype: str
    """One of NUMBER_BYTES."""
    key: Places
    value: Places


class Comparison:
    """Compares two slots.

    Args:
        units: all that a slot has.
        numbers: by which the distance is known; None: bits are compared.
        bound: see BOUND.
    """

    def __init__(
        self, units: Sequence[Unit], numbers: Numbers | None, bound: float = BOUND
    ) -> None:
        self.units = tuple(units)
        self.numbers = numbers
        self._bound = bound

    @property
    def in_words(self) -> str:
        """How it compares, for the log."""
        if self.numbers is None:
            return "bit for bit"
        return f"by the distance of K and V, which may be {self._bound:g}"

    def look(
        self, stored: memoryview, computed: memoryview, blocks: range
    ) -> Iterator[Difference | None]:
        """The difference that each unit has; None: it has none. The caller may stop at any.

        Args:
            blocks: of the slots, that are compared.
        """
        for unit in self.units:
            at = unit.within(blocks)
            one, other = (np.frombuffer(slot[at], np.uint8) for slot in (stored, computed))
            if np.array_equal(one, other):
                yield None
            elif self.numbers is None:
                yield Difference(unit.rank, unit.layer, "", -1, math.inf)
            else:
                yield self._beyond(unit, one, other, len(blocks))

    def _beyond(self, unit: Unit, one: Any, other: Any, num_blocks: int) -> Difference | None:
        assert self.numbers is not None
        x, y = (floats_of(part, self.numbers.dtype) for part in (one, other))
        x, y = (part.reshape(num_blocks, -1) for part in (x, y))
        with np.errstate(over="ignore", invalid="ignore"):
            # Over blocks first, so that places are looked up once and not for each block.
            sums = [np.square(part).sum(axis=0, dtype=np.float64) for part in (x - y, x, y)]
        worst: Difference | None = None
        for side, places in (("K", self.numbers.key), ("V", self.numbers.value)):
            distances = distances_of(*(part[places].sum(axis=(0, 2)) for part in sums))
            head = int(np.argmax(distances))
            distance = float(distances[head])
            if distance > self._bound and (worst is None or distance > worst.distance):
                worst = Difference(unit.rank, unit.layer, side, head, distance)
        return worst


def distances_of(apart: Any, one: Any, other: Any) -> npt.NDArray[np.float64]:
    """[heads]. What is no number is infinitely far, but not from what is none either: a model may
    compute such, and for which prompts it does is for clients to find.

    Args:
        apart, one, other: [heads] sums of squares, of the differences and of the two.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.maximum(one, other)
        of_numbers = np.where(np.isfinite(size), size, 0.0)
        size = np.maximum(size, FLOOR * of_numbers.mean())
        found: npt.NDArray[np.float64] = np.sqrt(apart / size)
    found[(apart == 0) | ~(np.isfinite(one) | np.isfinite(other))] = 0.0
    return np.nan_to_num(found, nan=math.inf, posinf=math.inf)


def floats_of(raw: npt.NDArray[np.uint8], dtype: str) -> _Floats:
    """The numbers, as float32. A copy, but of float32."""
    if dtype == "bfloat16":
        wide = raw.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return raw.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32, copy=False)
