# SPDX-License-Identifier: Apache-2.0
"""What a case comes to: its row, its figures with their goals, and the tables of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from attnstore_lab.bench.summary import table
from benchmarks.e2e.answers import Tried

GOALS: Final[dict[str, tuple[float, bool]]] = {
    "dram_over_hbm": (1.10, True),
    "throughput": (0.98, False),
    "bandwidth": (0.90, False),
    "slowdown_percent": (3.0, True),
}
"""(goal, whether it is the most that may be)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number; `kind` is a key of GOALS if something is to be reached."""

    name: str
    value: float
    kind: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        goal, at_most = GOALS.get(self.kind, (None, False))
        is_met = None
        if goal is not None:
            is_met = self.value <= goal if at_most else self.value >= goal
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "kind": self.kind,
            "goal": goal,
            "goal_is": "at most" if at_most else "at least",
            "is_met": is_met,
            "detail": self.detail,
        }


@dataclass(slots=True)
class Row:
    """The outcome of one case."""

    name: str
    outcome: str = "ok"
    """ok, failed, skipped or not run."""
    why: str = ""
    seconds: float = 0.0
    tried: Tried = field(default_factory=Tried)
    figures: list[Figure] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Copies: other threads may add to it."""
        return {
            "name": self.name,
            "outcome": self.outcome,
            "why": self.why,
            "seconds": round(self.seconds, 1),
            "phases": {name: dict(phase) for name, phase in list(self.tried.phases.items())},
            "facts": self.tried.facts,
            "complaints": self.tried.complaints,
            "figures": [figure.to_json() for figure in list(self.figures)],
        }


def show(rows: list[dict[str, Any]]) -> str:
    """A table of the cases, and one of the figures."""
    cells = [["case", "outcome", "s", "answers", "wrong", "drift", "dram", "preempted", "nvme"]]
    for row in rows:
        phases = row["phases"].values()
        drifts = [p["drift"] / p["limit"] for p in phases if p.get("limit")]
        cells.append(
            [
                row["name"],
                row["outcome"],
                f"{row['seconds']:.0f}",
                str(sum(p.get("answers", 0) for p in phases)),
                str(sum(p.get("wrong", 0) for p in phases)),
                f"{max(drifts):.2f}" if drifts else "-",
                str(row["phases"].get("dram", {}).get("loaded_tokens", "-")),
                str(sum(p.get("preempted", 0) for p in phases)),
                str(row["phases"].get("nvme", {}).get("loaded_tokens", "-")),
            ]
        )
    lines = [table(cells), "drift: over what rounding may differ by; dram, nvme: tokens loaded"]
    lines += [f"{row['name']}: {row['why']}" for row in rows if row["why"]]
    lines += [f"{row['name']} said: {said}" for row in rows for said in row["complaints"]]
    figures = [figure for row in rows for figure in row["figures"]]
    if figures:
        met = {None: "", True: "yes", False: "NO"}
        found = [["figure", "value", "goal", "met"]]
        for f in figures:
            goal = "" if f["goal"] is None else f"{f['goal_is']} {f['goal']:g}"
            found.append([f["name"], f"{f['value']:.3f}", goal, met[f["is_met"]]])
        lines += ["", table(found)]
    return "\n".join(lines)
