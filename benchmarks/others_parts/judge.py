# SPDX-License-Identifier: Apache-2.0
"""What an answer says of a connector: pure functions, and the table of what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from attnstore_vllm.errors import AttnStoreError
from benchmarks.rounding import Answer, drift

NAMED: Final = 2
"""Significant digits of a drift in words."""


class Outcome(StrEnum):
    """Of one fault with one system. WRONG is the one that must not be."""

    RIGHT = "served right"
    WRONG = "served WRONG"
    COMPUTED = "computed"
    REFUSED = "refused"
    ENDED = "engine ended"
    NOT_REACHED = "n/a"
    ABSENT = "does not run"


class NoPowerError(AttnStoreError):
    """A fault changes no answer: a connector that serves old KV would pass for a right one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of one fault with one system.

    Args:
        served: tokens of the prompts that were not computed; of: the most that could be.
        drift: the largest between an answer and its reference, in nats; limit: what is rounding.
        why: in words, where the outcome alone does not say it.
    """

    outcome: Outcome
    served: int = 0
    of: int = 0
    drift: float = 0.0
    limit: float = 0.0
    why: str = ""


def judge(pairs: Sequence[tuple[Answer, Answer]], served: int, of: int, limit: float) -> Cell:
    """Args:
    pairs: (answer, what a fresh engine without a connector computes) of each prompt.
    limit: benchmarks.rounding.bound of that engine's own drifts.
    """
    largest = max(drift(answer, reference) for answer, reference in pairs)
    if not largest <= limit:
        why = "" if served else "it says that it served nothing"
        return Cell(Outcome.WRONG, served, of, largest, limit, why)
    return Cell(Outcome.RIGHT if served else Outcome.COMPUTED, served, of, largest, limit)


def check_power(old: Sequence[Answer], new: Sequence[Answer], limit: float) -> None:
    """Each prompt's answer must be another one after the change. Raises: NoPowerError."""
    least = min(drift(a, b) for a, b in zip(old, new, strict=True))
    if least <= limit:
        raise NoPowerError(f"the fault moves an answer by {least:.2g}, and {limit:.2g} is rounding")


def words(cell: Mapping[str, Any]) -> str:
    """Of a cell of the file, for a table."""
    outcome = Outcome(cell["outcome"])
    if outcome is Outcome.RIGHT and cell["served"] < cell["of"]:
        return f"{outcome}, {cell['served']} of {cell['of']}"
    return f"**{outcome}**" if outcome is Outcome.WRONG else str(outcome)


def table(result: Mapping[str, Any], faults: Mapping[str, str]) -> str:
    """Of all systems that ran, in Markdown: a row a fault.

    Args:
        faults: by name, in words.
    """
    systems = result["systems"]
    ran = [
        name
        for name, system in systems.items()
        if any(c["outcome"] != Outcome.ABSENT for c in system["cells"].values())
    ]
    lines = [f"| fault | {' | '.join(ran)} |", "|---" * (len(ran) + 1) + "|"]
    for fault, told in faults.items():
        cells = [systems[name]["cells"].get(fault) for name in ran]
        shown = [words(cell) if cell else "not run" for cell in cells]
        lines.append(f"| {told} (`{fault}`) | {' | '.join(shown)} |")
    return "\n".join(lines)


def absent(result: Mapping[str, Any]) -> dict[str, str]:
    """Systems that did not run, and why."""
    found = {}
    for name, system in result["systems"].items():
        cells = system["cells"].values()
        if cells and all(cell["outcome"] == Outcome.ABSENT for cell in cells):
            found[name] = next(iter(cells))["why"]
    return found
