# SPDX-License-Identifier: Apache-2.0
"""A picture of an experiment: for each metric, groups of bars by point and system."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any, Final

from benchmarks.experiments.spec import Experiment, Goal, Metric

PAPER: Final = "paper"
COLUMNS: Final = 2
COLORS: Final = {
    "attnstore": "C0", "lru-ahead": "C1", "lru": "C2", "fifo": "C3", "belady": "C4",
    "infinite": "C5",
    "bound": "C5", "dram": "C6", "recompute": "C7", "re": "C7", "vllm": "C8", "lmcache": "C9",
    PAPER: "lightgray",
}  # fmt: skip
"""Of systems that many pictures have. Others get what is left, in their order."""
LABELS_MAX: Final = 8
"""More below a panel stand upright."""


def plot(experiment: Experiment, result: dict[str, Any], path: Path) -> None:
    """Draw `result`, of results/experiments/NAME.json. A system has one colour in all of them."""
    from matplotlib.figure import Figure  # noqa: PLC0415  a second to import

    shown = experiment.metrics
    bars = [_bars(metric, result["values"][metric.name]) for metric in shown]
    names = dict.fromkeys(name for panel in bars for name in panel if name not in COLORS)
    colors = {name: f"C{1 + n % 9}" for n, name in enumerate(names)} | COLORS
    rows = math.ceil(len(shown) / COLUMNS)
    figure = Figure(figsize=(6 * min(COLUMNS, len(shown)), 1 + 3 * rows), layout="constrained")
    panels = figure.subplots(rows, min(COLUMNS, len(shown)), squeeze=False).flat
    for metric, panel, axes in zip(shown, bars, panels, strict=False):
        _draw(axes, panel, colors)
        labels = [*result["values"][metric.name]]
        rotation = 90 if len(labels) > LABELS_MAX else 0
        axes.set_xticks(range(len(labels)), labels, rotation=rotation)
        title = textwrap.wrap(f"{metric.words}{', %' if metric.unit == '%' else ''}", 62)
        if metric.goal is not None:
            title.append(f"(goal for {metric.goal.system}: {metric.goal.words(metric.unit)})")
            _draw_goal(axes, metric.goal, metric.unit)
        axes.set_title("\n".join(title), fontsize="small")
    for axes in panels:  # a place without a metric
        axes.set_axis_off()
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=8)
    figure.suptitle(f"{experiment.question} ({result['kind']})", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(metric: Metric, by_point: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Heights by system, one for each point; the paper's first."""
    scale = 100 if metric.unit == "%" else 1
    names = list(dict.fromkeys(name for values in by_point.values() for name in values))
    bars: dict[str, list[Any]] = {PAPER: [metric.paper.get(label) for label in by_point]}
    for name in names:
        values = [at.get(name) for at in by_point.values()]
        middles = [value[0] if isinstance(value, list) else value for value in values]
        bars[name] = [None if value is None else scale * value for value in middles]
    return {name: heights for name, heights in bars.items() if any(h is not None for h in heights)}


def _draw(axes: Any, bars: dict[str, list[Any]], colors: dict[str, str]) -> None:
    width = 0.8 / max(1, len(bars))
    points = max((len(heights) for heights in bars.values()), default=0)
    for n, (name, heights) in enumerate(bars.items()):
        at = [place - 0.4 + width * (n + 0.5) for place in range(points)]
        hatch = "//" if name == PAPER else None
        drawn = [h or 0 for h in heights]
        box = axes.bar(at, drawn, width, label=name, hatch=hatch, color=colors[name])
        if points * len(bars) <= 12:  # more would stand on each other
            labels = ["" if h is None else f"{h:.3g}" if h < 1000 else f"{h:,.0f}" for h in heights]
            axes.bar_label(box, labels, fontsize="x-small")
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.12)


def _draw_goal(axes: Any, goal: Goal, unit: str) -> None:
    at = goal.at_most if goal.at_most is not None else goal.at_least
    if at is not None:
        at *= 100 if unit == "%" else 1
        axes.axhline(at, color="black", linestyle="--", linewidth=0.8, zorder=0)  # behind bars
