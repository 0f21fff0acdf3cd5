# SPDX-License-Identifier: Apache-2.0
"""A picture of an experiment: for each metric, groups of bars by point and system."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.experiments.spec import Experiment

PAPER: Final = "paper"


def plot(experiment: Experiment, result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  a second to import

    shown = experiment.metrics
    figure = Figure(figsize=(9, 0.8 + 2.6 * len(shown)), layout="constrained")
    for axes, metric in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        by_point = result["values"][metric.name]
        scale = 100 if metric.unit == "%" else 1
        names = list(dict.fromkeys(name for values in by_point.values() for name in values))
        bars = {name: [values.get(name) for values in by_point.values()] for name in names}
        bars = {k: [None if v is None else scale * v for v in vs] for k, vs in bars.items()}
        if metric.paper:
            bars = {PAPER: [metric.paper.get(label) for label in by_point]} | bars
        bars = {k: vs for k, vs in bars.items() if any(v is not None for v in vs)}
        width = 0.8 / max(1, len(bars))
        for n, (name, heights) in enumerate(bars.items()):
            at = [place - 0.4 + width * (n + 0.5) for place in range(len(heights))]
            hatch = "//" if name == PAPER else None
            axes.bar(at, [h or 0 for h in heights], width, label=name, hatch=hatch)
        axes.set_xticks(range(len(by_point)), list(by_point))
        axes.set_ylabel(f"{metric.words}{', %' if scale == 100 else ''}", fontsize="small")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{experiment.question} ({result['kind']})", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
