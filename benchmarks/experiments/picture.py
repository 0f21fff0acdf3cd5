# SPDX-License-Identifier: Apache-2.0
"""A picture of an experiment: one metric, as lines where something grows, else as bars.

The tables of docs/results.md have the other metrics, and every number.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attnstore_lab import palette
from benchmarks.experiments.spec import Experiment, Metric

KINDS: Final = {
    "simulated": "simulated",
    "CPU": "measured on a CPU",
    "GPU": "measured on a GPU",
}
TITLE_LETTERS, LETTERS = 84, 96
"""Of a line that fits."""
GROUPED: Final = re.compile(r"([\d.]+), ([\d.]+) (\S+)")
"""A point that varies two things: "0.5, 2 GB/s"."""
SEEN: Final = 0.02
"""Of the larger figure: bars that differ by less look the same, and the table says as much."""
Values = Mapping[str, Sequence[float | None]]


def says_something(experiment: Experiment, result: Mapping[str, Any]) -> bool:
    """Systems differ at some point, or, where there is one, points do."""
    metric = experiment.pictured
    values = _values(metric, result["values"][metric.name])
    of_points = list(zip(*values.values(), strict=True)) if len(values) > 1 else values.values()
    found = [[v for v in of if v is not None] for of in of_points]
    return any(max(of) - min(of) >= SEEN * max(of) > 0 for of in found if of)


def plot(experiment: Experiment, result: dict[str, Any], path: Path) -> None:
    """Draw `result`, of results/experiments/NAME.json. A system has one colour in all of them."""
    metric = experiment.pictured
    by_point = result["values"][metric.name]
    heading = _in_lines(title(experiment, result))
    said = _said(metric, result)
    points = list(by_point)
    grouped = [GROUPED.fullmatch(point) for point in points]
    if len(points) > 1 and all(grouped):
        parts = [found.groups() for found in grouped if found]
        figure = _small_multiples(_values(metric, by_point), parts, heading, said)
    elif len(points) > 1 and all(re.fullmatch(r"[\d.]+", point) for point in points):
        at = [float(point) for point in points]
        figure = _lines(_values(metric, by_point), at, heading, said)
        figure.axes[0].set_xlabel("\n".join(textwrap.wrap(experiment.varied, LETTERS)))
    else:
        figure = _bars(metric, by_point, heading, said)
    palette.save(figure, path)


def title(experiment: Experiment, result: Mapping[str, Any]) -> str:
    """What is seen; or the question, where there is no message or the result does not bear it."""
    metric = experiment.pictured
    by_point = result["values"][metric.name]
    series = {
        name: {label: v for label, v in zip(by_point, all_, strict=True) if v is not None}
        for name, all_ in _values(metric, by_point).items()
    }
    said = experiment.message.title(series) if experiment.message else None
    return said or experiment.question


def _in_lines(words: str) -> str:
    """Of a like length, so that no single word stands below the others."""
    lines = textwrap.wrap(words, TITLE_LETTERS)
    return "\n".join(textwrap.wrap(words, min(TITLE_LETTERS, len(words) // len(lines) + 10)))


def _said(metric: Metric, result: Mapping[str, Any]) -> str:
    """What is drawn, and whether its goal is met."""
    said = f"{metric.words}{f', {metric.unit}' if metric.unit else ''} ({KINDS[result['kind']]})"
    if metric.goal is not None and not result["quick"]:
        found = [
            _middle(at.get(metric.goal.system)) for at in result["values"][metric.name].values()
        ]
        met = sum(value is not None and metric.goal.is_met(value) for value in found)
        words = f"{palette.name(metric.goal.system)}: {metric.goal.words(metric.unit)}"
        said += f". Goal for {words}, met at {met} of {len(found)} points"
    return "\n".join(textwrap.wrap(said, LETTERS))


def _values(metric: Metric, by_point: Mapping[str, Mapping[str, Any]]) -> Values:
    """By system, one for each point; the paper's first."""
    scale = 100 if metric.unit == "%" else 1
    names = dict.fromkeys(name for values in by_point.values() for name in values)
    found: dict[str, list[float | None]] = {
        palette.PAPER: [metric.paper.get(label) for label in by_point]
    }
    for name in names:
        middles = [_middle(at.get(name)) for at in by_point.values()]
        found[name] = [None if value is None else scale * value for value in middles]
    return {name: all_ for name, all_ in found.items() if any(v is not None for v in all_)}


def _middle(value: Any) -> float | None:
    """Of a figure, or of a middle with where it lies between."""
    return value[0] if isinstance(value, list) else value


def _bars(metric: Metric, by_point: Mapping[str, Any], title: str, said: str) -> Any:
    """A row for each system with its figure, a heading for each point: no words on others."""
    values = _values(metric, by_point)
    colors = palette.colors(values)
    has_headings = len(by_point) > 1 and len(values) > 1
    rows: list[tuple[float, str, float | None]] = []
    labels, at = [], 0.0
    figure, ((axes,),) = palette.figure((9, 1), title)
    for n, point in enumerate(by_point):
        if has_headings:
            axes.annotate(point, (0, at), (4, 0), textcoords="offset points", va="center")
            at += 1
        for name, all_ in values.items():
            if all_[n] is not None:
                rows.append((at, name, all_[n]))
                labels.append(point if len(values) == 1 < len(by_point) else palette.name(name))
                at += 1
        at += 0.5
    figure.set_figheight(1.1 + 0.27 * at + 0.2 * title.count("\n") + 0.2 * said.count("\n"))
    highest = max((value or 0 for _, _, value in rows), default=0)
    for place, name, value in rows:
        _bar(axes, place, name, value or 0, colors[name])
        goal = _goal_of(metric, name)
        if goal is not None:
            axes.plot([goal, goal], [place - 0.5, place + 0.5], color=palette.INK, ls="--")
        stands = max(value or 0, goal or 0) if _near(value, goal, highest) else value or 0
        axes.annotate(
            _figure(value), (stands, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks([place for place, _, _ in rows], labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.9, -0.6)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(said, loc="left")
    return figure


def _bar(axes: Any, place: float, name: str, value: float, color: str) -> None:
    if name == palette.PAPER:
        axes.barh(place, value, 0.84, hatch="//", fill=False, edgecolor=color)
    else:
        axes.barh(place, value, 0.84, color=color)


def _goal_of(metric: Metric, name: str) -> float | None:
    if metric.goal is None or metric.goal.system != name:
        return None
    at = metric.goal.at_most if metric.goal.at_most is not None else metric.goal.at_least
    return None if at is None else at * (100 if metric.unit == "%" else 1)


def _near(value: float | None, goal: float | None, highest: float) -> bool:
    """The goal's line would go through the figure beside the bar."""
    return value is not None and goal is not None and 0 <= goal - value < 0.1 * highest


def _lines(values: Values, at: Sequence[float], title: str, said: str) -> Any:
    figure, ((axes,),) = palette.figure((9, 4), title)
    _draw(axes, at, values)
    axes.set_ylim(bottom=0)
    axes.set_title(said, loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _small_multiples(
    values: Values, parts: Sequence[tuple[Any, ...]], title: str, said: str
) -> Any:
    """A panel for each first number, lines over the second."""
    groups = list(dict.fromkeys(first for first, _, _ in parts))
    figure, (panels,) = palette.figure((9, 4), title, 1, len(groups), sharey=True)
    for group, axes in zip(groups, panels, strict=True):
        mine = [n for n, part in enumerate(parts) if part[0] == group]
        at = [float(parts[n][1]) for n in mine]
        _draw(axes, at, {name: [all_[n] for n in mine] for name, all_ in values.items()})
        axes.set_title(f"load {group}", loc="left")
        axes.set_xlabel(f"NVMe, {parts[0][2]}")
    highest = max(v for all_ in values.values() for v in all_ if v is not None)
    panels[0].set_ylim(0, 1.1 * highest)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=5,
        title=said,
        alignment="left",
    )
    return figure


def _draw(axes: Any, at: Sequence[float], values: Values) -> None:
    colors = palette.colors(values)
    for n, (name, all_) in enumerate(values.items()):
        heights = [float("nan") if value is None else value for value in all_]
        mark = palette.MARKS[n % len(palette.MARKS)]
        axes.plot(at, heights, color=colors[name], marker=mark, label=palette.name(name))
    axes.set_xscale("log")
    axes.set_xticks(at, [f"{value:g}" for value in at])
    axes.minorticks_off()


def _figure(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
