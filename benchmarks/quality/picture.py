# SPDX-License-Identifier: Apache-2.0
"""A picture of the figures: perplexity and recall by what is cut, and what recomputing buys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.quality.report import POINTS_GOAL, RATIO_GOAL

COLORS = {"TT": "#999999", "CA": "#3e7cb1", "NKVT": "#b0413e"}
MARKS = {1: "o", 10: "s"}


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib  # noqa: PLC0415  (a second to import, and only here)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, ((top_a, top_b, top_c), (low_a, low_b, low_c)) = pyplot.subplots(
        2, 3, figsize=(12, 7), layout="constrained"
    )
    _ratios(top_a, result["cells"], ("CA",))
    top_a.axhline(RATIO_GOAL, color=COLORS["TT"], linestyle="--", linewidth=1)
    top_a.set_title("Perplexity with reused KV", fontsize=10)
    _ratios(top_b, result["cells"], ("CA", "NKVT"))
    top_b.set_yscale("log")
    top_b.set_title("The same, with old positions inside", fontsize=10)
    _recall(top_c, result["cells"])
    _curve(low_a, result["curve"], "perplexity_ratio", "perplexity, CA over TT", 1.0)
    low_a.set_title("Recomputing k tokens: perplexity", fontsize=10)
    _curve(low_b, result["curve"], "recall_points_lost", "right answers, TT - CA, points", 0.0)
    low_b.axhline(POINTS_GOAL, color=COLORS["TT"], linestyle="--", linewidth=1)
    low_b.set_title("Recomputing k tokens: recall", fontsize=10)
    _layers(low_c, result["layers"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _groups(cells: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(cell["overflows"], []).append(cell)
    return groups


def _bars(values: list[dict[str, float]]) -> list[list[float]]:
    return [
        [v["value"] - v["low"] for v in values],
        [v["high"] - v["value"] for v in values],
    ]


def _ratios(axis: Any, cells: list[dict[str, Any]], methods: tuple[str, ...]) -> None:
    for overflows, group in _groups(cells).items():
        for method in methods:
            values = [cell["perplexity_ratio"][method] for cell in group]
            axis.errorbar(
                [100 * cell["ratio"] for cell in group],
                [v["value"] for v in values],
                yerr=_bars(values),
                color=COLORS[method],
                marker=MARKS.get(overflows, "^"),
                linestyle="-" if overflows == 1 else ":",
                capsize=2,
                label=f"{method}, overflowed {overflows} x",
            )
    axis.axhline(1.0, color=COLORS["TT"], linewidth=1)
    axis.set(xlabel="cut, % of the window", ylabel="perplexity over recomputing (TT)")
    axis.legend(frameon=False, fontsize=7)


def _recall(axis: Any, cells: list[dict[str, Any]]) -> None:
    for overflows, group in _groups(cells).items():
        for method, color in COLORS.items():
            values = [cell["methods"][method] for cell in group]
            axis.errorbar(
                [100 * cell["ratio"] for cell in group],
                [100 * v["recall"] for v in values],
                yerr=[196 * v["recall_standard_error"] for v in values],
                color=color,
                marker=MARKS.get(overflows, "^"),
                linestyle="-" if overflows == 1 else ":",
                capsize=2,
                label=f"{method}, {overflows} x",
            )
    axis.set(xlabel="cut, % of the window", ylabel="right answers, %", ylim=(0, 103))
    axis.set_title("Recall of what was kept", fontsize=10)
    axis.legend(frameon=False, fontsize=7)


def _curve(axis: Any, curve: list[dict[str, Any]], key: str, label: str, even: float) -> None:
    """A line for each part that is recomputed, by how many tokens."""
    for overflows in sorted({point["overflows"] for point in curve}):
        for part, color in (("first", "#3e7cb1"), ("last", "#c9a227")):
            other = "last" if part == "first" else "first"
            line = [p for p in curve if p["overflows"] == overflows and p[other] == 0]
            line.sort(key=lambda point: point[part])
            values = [point[key] for point in line]
            axis.errorbar(
                [str(point[part]) for point in line],
                [v["value"] for v in values],
                yerr=_bars(values),
                color=color,
                marker=MARKS.get(overflows, "^"),
                linestyle="-" if overflows == 1 else ":",
                capsize=2,
                label=f"the {part} k, overflowed {overflows} x",
            )
    axis.axhline(even, color=COLORS["TT"], linewidth=1)
    axis.set(xlabel="k", ylabel=label)
    axis.legend(frameon=False, fontsize=7)


def _layers(axis: Any, layers: list[dict[str, Any]]) -> None:
    for line in layers:
        for name, style in (("k", "-"), ("v", ":")):
            axis.plot(
                line[name],
                linestyle=style,
                marker=MARKS.get(line["overflows"], "^"),
                label=f"{name.upper()}, {line['ratio']:.0%} cut, {line['overflows']} x",
            )
    axis.set(xlabel="layer", ylabel="|CA - TT| / |TT|")
    axis.set_title("What the layers remember of the cut", fontsize=10)
    axis.legend(frameon=False, fontsize=6)
