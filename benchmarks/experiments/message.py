# SPDX-License-Identifier: Apache-2.0
"""The title of an experiment's picture: what is seen in it, with figures of the result alone.

    message:
      says: "Prefill takes {attnstore.least:.2f} to {attnstore.most:.2f} of the time"
      holds: [attnstore < 1, attnstore < lru, attnstore falls]

`{system}` is its figure at the first point, `{system[LABEL]}` at that point, `.least` and `.most`
those of all points, `.least_at` the label of the least. A claim compares a system with another or
with a number at every point that has both, or with `.least` and `.most` two figures; `falls` and
`rises` are from point to point. If a claim does not hold, or a system is missing, as in a quick
run, the title is the experiment's question.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

Series = Mapping[str, float]
"""Of a system: by point, where it has a figure; shares in per cent."""
COMPARES: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COMPARED: Final = re.compile(
    r"([^<>.]+(?:\.least|\.most)?) (<=?|>=?) (\d+(?:\.\d+)?|[^<>.]+(?:\.least|\.most)?)"
)
TREND: Final = re.compile(r"([^<>.]+) (falls|rises)")


class MessageError(ValueError):
    """A message or a claim cannot be read. It says which, and what was expected."""


@dataclass(frozen=True, slots=True)
class Message:
    """`says` of the YAML, and `holds`: the claims that it makes."""

    says: str
    holds: Sequence[str] = ()

    def title(self, values: Mapping[str, Series]) -> str | None:
        """None if `values` lack a figure, or a claim does not hold."""
        try:
            is_true = all(_holds(claim, values) for claim in self.holds)
            figures = {name: _Figures(series) for name, series in values.items()}
            return self.says.format_map(figures) if is_true else None
        except KeyError:
            return None


def parse(given: Any) -> Message:
    """Raises: MessageError."""
    if not isinstance(given, dict) or not {"says"} <= given.keys() <= {"says", "holds"}:
        raise MessageError(f"message: {{says: ..., holds: [...]}} is expected, not {given!r}")
    for claim in given.get("holds", ()):
        if not COMPARED.fullmatch(claim) and not TREND.fullmatch(claim):
            raise MessageError(
                f"message.holds: {claim!r} was found; expected `a < b`, `a falls` or `a rises`"
            )
    return Message(**given)


class _Figures:
    """What a template may name of a system."""

    def __init__(self, series: Series) -> None:
        if not series:
            raise KeyError("no point has a figure")
        self._series = series

    def __format__(self, spec: str) -> str:
        return format(next(iter(self._series.values())), spec)

    def __getitem__(self, label: str | int) -> float:
        return self._series[str(label)]

    @property
    def least(self) -> float:
        return min(self._series.values())

    @property
    def most(self) -> float:
        return max(self._series.values())

    @property
    def least_at(self) -> str:
        return min(self._series, key=self._series.__getitem__)


def _holds(claim: str, values: Mapping[str, Series]) -> bool:
    trend = TREND.fullmatch(claim)
    if trend:
        falls = trend[2] == "falls"
        steps = list(pairwise(values[trend[1]].values()))
        return bool(steps) and all(b < a if falls else b > a for a, b in steps)
    found = COMPARED.fullmatch(claim)
    assert found, claim
    left, right = _operand(found[1], values), _operand(found[3], values)
    labels = [label for side in (left, right) if isinstance(side, Mapping) for label in side]
    pairs = [(_at(left, label), _at(right, label)) for label in labels or [""]]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(both) and all(COMPARES[found[2]](a, b) for a, b in both)


def _operand(words: str, values: Mapping[str, Series]) -> Series | float:
    if words[0].isdigit():
        return float(words)
    name, _, of_all = words.partition(".")
    if not of_all:
        return values[name]
    return float(getattr(_Figures(values[name]), of_all))


def _at(side: Series | float, label: str) -> float | None:
    return side.get(label) if isinstance(side, Mapping) else side
