# SPDX-License-Identifier: Apache-2.0
"""Is stored KV what was computed once more? Pure: two slots of bytes, compared layer by layer.

Bit for bit where a computation gives the same bits however its batch is made up. Elsewhere rounding
differs from batch to batch, and the *distance* counts: of each side (K, V, a latent, a state), a
layer, a head and a block,

    |stored - computed| / sqrt(|stored| |computed|)        the root of the sums of squares, over
                                                           the block's tokens

0: they are equal; 1.4: they have nothing to do with each other; 2.8: one is ten times the other.
The largest one counts: over all blocks one wrong block of sixteen would be a third of that.

A head of next to no weight counts as one of FLOOR of its layer's mean, and a block as one of
BLOCK_FLOOR of its head's: rounding beside large ones makes no distance. A head that is all zeros in
one of the two is infinitely far from another, but for one that is next to nothing (ZERO_FLOOR).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
"""[tokens, heads, dim]: the place of each number of a side within a page, in numbers of its
type."""
Blocks = Sequence[range]
"""Places of blocks in a slot: a section whose slot has few may begin behind its end."""
Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

BOUND: Final = 0.5
"""The distance up to which a difference may be rounding in any model (learned_bound.py)."""
STATE_BOUND: Final = 1.1
"""The same of states, which are summed up otherwise where steps of a prompt end elsewhere."""
FLOOR: Final = 0.01
BLOCK_FLOOR: Final = 0.1
ZERO_FLOOR: Final = 1e-4
"""All three are parts of sums of squares."""
NUMBER_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Types of KV whose distance is known."""
KEY, VALUE = "K", "V"


class Unit(NamedTuple):
    """A layer's pages of one rank, in a slot."""

    rank: int
    layer: int
    """Number among those of this group in the rank's pipeline stage."""
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
    """Its name; empty where bits are compared."""
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
class Side:
    """Numbers of a page that are compared together."""

    name: str
    """KEY, VALUE, or what else it is."""
    dtype: str
    """One of NUMBER_BYTES."""
    places: Places


class Comparison:
    """Compares two slots of one KV cache group.

    Args:
        units: all that a slot has.
        sides: by which the distance is known; None: bits are compared.
        content_bytes: of a page, from its beginning on: what is behind it may be anything. None:
            all of it.
        most: see BOUND.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sides: Sequence[Side] | None,
        content_bytes: int | None = None,
        most: float = BOUND,
    ) -> None:
        self.units = tuple(units)
        self.sides = None if sides is None else tuple(sides)
        self._heads = {
            dtype: _Heads([side for side in self.sides or () if side.dtype == dtype])
            for dtype in {side.dtype for side in self.sides or ()}
        }
        self.content_bytes = content_bytes
        self.most = most
        self.largest = 0.0
        """The largest distance that the last look() has met so far, of those it let pass."""

    @property
    def in_words(self) -> str:
        """How it compares, for the log."""
        if self.sides is None:
            return "bit for bit"
        names = " and ".join(side.name for side in self.sides)
        return f"by the distance of {names}, which may be {self.most:g}, or what rounding has shown"

    def look(
        self, stored: memoryview, computed: memoryview, blocks: Blocks, bound: float = BOUND
    ) -> Iterator[Difference | None]:
        """The difference that each unit has; None: it has none. The caller may stop at any.

        Args:
            blocks: of the slots, that are compared.
            bound: a distance beyond it is a difference.
        """
        self.largest = 0.0
        for unit in self.units:
            one, other = (self.pages(slot, unit, blocks) for slot in (stored, computed))
            yield self.differ(unit, one, other, bound)

    def pages(self, slot: memoryview, unit: Unit, blocks: Blocks) -> Bytes:
        """[blocks, bytes]: the content of a unit's pages. No copy where the blocks follow each
        other and fill theirs."""
        parts = [
            np.frombuffer(slot[unit.within(some)], np.uint8).reshape(len(some), -1)
            for some in blocks
        ]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.ascontiguousarray(whole[:, : self.content_bytes])

    def differ(
        self, unit: Unit, one: Bytes, other: Bytes, bound: float = BOUND
    ) -> Difference | None:
        """The difference of two contents, if they have one.

        Args:
            unit: that it is of.
            one, other: see pages().
            bound: see look().
        """
        if np.array_equal(one, other):
            return None
        if self.sides is None:
            return Difference(unit.rank, unit.layer, "", -1, math.inf)
        worst: Difference | None = None
        for side, distances in zip(self.sides, self.distances(one, other), strict=True):
            head = int(np.argmax(distances)) % distances.shape[1]
            distance = float(distances.max())
            if distance <= bound:
                self.largest = max(self.largest, distance)
            elif worst is None or distance > worst.distance:
                worst = Difference(unit.rank, unit.layer, side.name, head, distance)
        return worst

    def distances(self, one: Bytes, other: Bytes) -> Iterator[npt.NDArray[np.float64]]:
        """[blocks, heads] of each side."""
        sums: dict[str, list[npt.NDArray[np.float64]]] = {}
        for side in self.sides or ():
            heads = self._heads[side.dtype]
            if side.dtype not in sums:
                x, y = (floats_of(part, side.dtype) for part in (one, other))
                with np.errstate(over="ignore", invalid="ignore"):
                    sums[side.dtype] = [heads.sums(np.square(part)) for part in (x - y, x, y)]
            yield distances_of(*(part[:, heads.of[side.name]] for part in sums[side.dtype]))


class _Heads:
    """The heads of all sides of one type, by where their numbers are in a page: runs that follow
    each other are summed in one pass, and no number is looked up by itself.

    Args:
        sides: at least one. No number is of two.
    """

    def __init__(self, sides: Sequence[Side]) -> None:
        self._size = 1 + max(int(side.places.max()) for side in sides)
        self.of: dict[str, slice] = {}
        """The heads of a side."""
        head_of, count = np.full(self._size, -1), 0
        for side in sides:
            heads = np.arange(count, count + side.places.shape[1])
            head_of[side.places] = heads[:, None]
            self.of[side.name] = slice(count, count + len(heads))
            count += len(heads)
        self._starts = np.flatnonzero(np.diff(head_of, prepend=-2))
        of_run = head_of[self._starts]
        self._order = np.argsort(of_run, kind="stable")[np.count_nonzero(of_run < 0) :]
        self._firsts = np.searchsorted(of_run[self._order], np.arange(count))

    def sums(self, numbers: _Floats) -> npt.NDArray[np.float64]:
        """[blocks, heads].

        Args:
            numbers: [blocks, numbers of a page].
        """
        of_runs = np.add.reduceat(numbers[:, : self._size], self._starts, axis=1)
        found: npt.NDArray[np.float64] = np.add.reduceat(
            of_runs[:, self._order], self._firsts, axis=1, dtype=np.float64
        )
        return found


def distances_of(apart: Any, one: Any, other: Any) -> npt.NDArray[np.float64]:
    """[blocks, heads]. What is no number is infinitely far, but not from what is none either: a
    model may compute such, and for which prompts it does is for clients to find.

    Args:
        apart, one, other: [blocks, heads] sums of squares, of the differences and of the two.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.maximum(one, other)
        of_numbers = np.where(np.isfinite(size), size, 0.0)
        least = np.maximum(BLOCK_FLOOR * of_numbers.mean(axis=0), FLOOR * of_numbers.mean())
        found: npt.NDArray[np.float64] = np.sqrt(apart / np.maximum(np.sqrt(one * other), least))
    is_lost = (one.sum(axis=0) == 0) != (other.sum(axis=0) == 0)
    is_lost &= of_numbers.mean(axis=0) > ZERO_FLOOR * of_numbers.mean()
    found[:, is_lost] = math.inf
    found[(apart == 0) | ~(np.isfinite(one) | np.isfinite(other))] = 0.0
    return np.nan_to_num(found, nan=math.inf, posinf=math.inf)


def floats_of(raw: Bytes, dtype: str) -> _Floats:
    """The numbers, as float32. A copy, but of float32.

    Args:
        raw: what its last axis has behind the last whole number is left out.
    """
    spare = raw.shape[-1] % NUMBER_BYTES[dtype]
    raw = np.ascontiguousarray(raw[..., : raw.shape[-1] - spare]) if spare else raw
    if dtype == "bfloat16":
        wide = raw.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return raw.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32, copy=False)
