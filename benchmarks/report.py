# SPDX-License-Identifier: Apache-2.0
"""docs/experiments.md: what the paper found, the bounds, what others do, what we do, side by side.

    python -m benchmarks.report [--results DIR] [--out FILE] [--pictures]

Made of results/experiments/*.json (python -m benchmarks.experiments). An experiment that was not
run, or only quickly, says so in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attnstore_lab import palette
from attnstore_lab.bench.environment import machine
from benchmarks.data import is_papers
from benchmarks.experiments.picture import plot, says_something, title
from benchmarks.experiments.spec import Experiment, Goal, Metric, read_all
from tools.wrap_pages import wrapped

__all__ = ["ending", "machine", "main", "render"]

ROOT: Final = Path(__file__).parent.parent
BOUNDS: Final = ("bound", "belady", "infinite")
OURS: Final = ("attnstore",)
MARKS: Final = {
    "simulated": "**simulated**, the store's own code over an assumed machine (docs/simulate.md)",
    "CPU": "**measured on a CPU**",
    "GPU": "**measured on a GPU**",
}
QUICKLY: Final = "none: a quick run shows that it runs, and nothing else"
HEAD: Final = """\
# Experiments

The questions of CachedAttention's evaluation (USENIX ATC'24), asked of this store. Written by
`python -m benchmarks.report` from `results/experiments/`; each section names its command.
*the paper's*: as printed there, on its machines. **Bold**: a goal that was missed; why, below the
table.
"""


def render(experiments: Mapping[str, Experiment], results: Path, pictures: str) -> str:
    """The whole document.

    Args:
        pictures: path of the results' directory, as the document names it.
    """
    parts = [HEAD, _contents(experiments, results)]
    for name, experiment in experiments.items():
        file = results / f"{name}.json"
        result = json.loads(file.read_text()) if file.exists() else None
        parts.append("\n".join(_section(experiment, result, pictures)))
    return wrapped("\n".join(parts))


def _contents(experiments: Mapping[str, Experiment], results: Path) -> str:
    rows = ["| experiment | question | |", "|---|---|---|"]
    for name, experiment in experiments.items():
        file = results / f"{name}.json"
        mark = json.loads(file.read_text())["kind"] if file.exists() else "not run yet"
        anchor = name.replace("_", "-")
        rows.append(f"| [{name}](#{anchor}) | {experiment.question} | {mark} |")
    return "\n".join([*rows, ""])


def _section(
    experiment: Experiment, result: Mapping[str, Any] | None, pictures: str
) -> Iterator[str]:
    yield f"## {experiment.name.replace('_', ' ')}"
    yield f"{experiment.question} Varied: {experiment.varied}."
    yield f"Paper: {experiment.paper}.\n" if experiment.paper else ""
    if result is None:
        yield f"Not run yet: `{experiment.command}`\n"
        return
    yield f"`{result['command']}`: {MARKS[result['kind']]}. {_about(result)}"
    if experiment.paper and not is_papers(result):
        yield "\n**Other conversations than the paper's:** this is not its figure repeated."
    if result["quick"]:
        yield "\n**A quick run, on a small part of the load: these figures show that it runs.**"
    if experiment.before:
        yield f"\n{experiment.before.strip()}"
    for metric in experiment.metrics:
        yield ""
        yield from _table(metric, result["values"][metric.name])
    for name, why in result.get("not_run", {}).items():
        yield f"\nNot run: {name}: {why.splitlines()[0]}"
    if experiment.notes:
        yield f"\n{experiment.notes.strip()}"
    if says_something(experiment, result):
        yield f"\n![{title(experiment, result)}]({pictures}/{experiment.name}.svg)"
    yield ""


def ending(experiment: Experiment, result: Mapping[str, Any]) -> Iterator[str]:
    """Lines that a run ends with: its tables, its goals, and a verdict on each."""
    for metric in experiment.metrics:
        yield from _table(metric, result["values"][metric.name])
        yield ""
    for metric in experiment.metrics:
        if metric.goal is not None:
            goal = f"{metric.goal.system}: {metric.goal.words(metric.unit)}"
            yield f"goal: {metric.words}, {goal}"
            yield f"verdict: {_verdict(metric, metric.goal, result)}"
    if not any(metric.goal for metric in experiment.metrics):
        yield "goal: none is set"
        yield f"verdict: {QUICKLY if result['quick'] else 'none; the tables are what was found'}"


def _verdict(metric: Metric, goal: Goal, result: Mapping[str, Any]) -> str:
    if result["quick"]:
        return QUICKLY
    by_point = result["values"][metric.name]
    found = {label: values.get(goal.system) for label, values in by_point.items()}
    singles = {k: v[0] if isinstance(v, Sequence) else v for k, v in found.items()}
    missed = [
        f"{label} has {cell(value, metric.unit)}"
        for label, value in singles.items()
        if value is not None and not goal.is_met(value)
    ]
    absent = [label for label, value in singles.items() if value is None]
    unknown = f"; not measured: {', '.join(absent)}" if absent else ""
    if missed:
        return f"missed: {'; '.join(missed)}{unknown}"
    met = len(singles) - len(absent)
    return f"met at {met} of {len(singles)} points{unknown}" if met else "not measured"


def _about(result: Mapping[str, Any]) -> str:
    """Machine and configuration, in a line."""
    here, body = result["machine"], result["body"]
    told = [str(result["data"])]
    if "data_sha256" in result:
        told[0] += f" (SHA-256 {result['data_sha256'][:12]})"
    if "data_conversations" in result:
        told.append(f"{result['data_conversations']:,} conversations")
    if result["kind"] != "simulated":
        if "model" in result:
            told.append(f"model {result['model']}, options `{' '.join(map(str, body['options']))}`")
        told.append(f"{here['cores']} cores, {here['cpu']}, vLLM {here['vllm']}")
    else:
        told.append(f"{body.get('sessions', 9000):,} sessions, seed {body.get('seed', 1)}")
    changed = "" if here.get("is_clean", True) else ", changed"
    told.append(f"commit {(here['commit'] or 'unknown')[:7]}{changed}, {result['seconds']:.0f} s")
    return "; ".join(told) + "."


def _table(
    metric: Metric, by_point: Mapping[str, Mapping[str, float | Sequence[float] | None]]
) -> Iterator[str]:
    """Rows are points, columns the paper, bounds, others and ours, in this order, with the names
    that pictures have."""
    found = [name for values in by_point.values() for name in values]
    names = [
        n for n in dict.fromkeys(found) if any(v.get(n) is not None for v in by_point.values())
    ]
    bounds = [name for name in BOUNDS if name in names]
    ours = [name for name in names if name.startswith(OURS)]
    others = [name for name in names if name not in (*bounds, *ours)]
    columns = [*([palette.PAPER] if metric.paper else []), *bounds, *others, *ours]
    unit = f", {metric.unit}" if metric.unit else ""
    goal = metric.goal
    said = f" (goal for {palette.name(goal.system)}: {goal.words(metric.unit)})" if goal else ""
    yield f"| {metric.words}{unit}{said} | {' | '.join(map(palette.name, columns))} |"
    yield "|---" * (len(columns) + 1) + "|"
    is_missed = False
    for label, values in by_point.items():
        cells = [cell(metric.paper.get(label), "")] if metric.paper else []
        for name in (*bounds, *others, *ours):
            value = values.get(name)
            shown = cell(value, metric.unit)
            if goal is not None and isinstance(value, float | int) and name == goal.system:
                if not goal.is_met(value):
                    is_missed, shown = True, f"**{shown}**"
            cells.append(shown)
        yield f"| {label} | {' | '.join(cells)} |"
    if is_missed:
        yield f"\nMissed: {metric.missed or 'why has not been looked into yet'}."


def cell(value: float | Sequence[float] | None, unit: str) -> str:
    """A figure; or a middle, and from where to where it lies."""
    if value is None:
        return ""
    if isinstance(value, Sequence):
        middle, low, high = (cell(v, unit) for v in value)
        return f"{middle} ({low} to {high})"
    if unit == "%":
        return f"{100 * value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "experiments")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "experiments.md")
    parser.add_argument("--pictures", action="store_true", help="draw them again, too")
    args = parser.parse_args(argv)
    experiments = read_all()
    if args.pictures:
        for name, experiment in experiments.items():
            file = args.results / f"{name}.json"
            result = json.loads(file.read_text()) if file.exists() else None
            if result is not None and says_something(experiment, result):
                plot(experiment, result, file.with_suffix(".svg"))
    pictures = os.path.relpath(args.results, args.out.parent)
    args.out.write_text(render(experiments, args.results, pictures), encoding="utf-8")
    print(f"written: {args.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
