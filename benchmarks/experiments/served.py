# SPDX-License-Identifier: Apache-2.0
"""Experiments with real servers on this machine: `python -m benchmarks.compare` at each point."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from attnstore_lab.testing.tiny_model import MEDIUM, SMALL, TINY, make_model
from benchmarks.compare.command import main as compare
from benchmarks.data import facts as data_facts
from benchmarks.experiments.intervals import interval, later_turns
from benchmarks.experiments.spec import Experiment, SpecError
from benchmarks.server import is_cpu_build

ROOT: Final = Path(__file__).parent.parent.parent
WORK: Final = ROOT / ".cache" / "experiments"
SHAPES: Final = {"tiny": TINY, "small": SMALL, "medium": MEDIUM}
OK, FAILED = 0, 1
IDS: Final = (300, 1000)
"""Of ordinary tokens in each of the small models."""
PER_SYSTEM: Final = (
    "ttft_first_p50",
    "ttft_first_p95",
    "ttft_later_p50",
    "ttft_later_p95",
    "prefill_tokens_per_s",
    "hit_share",
    "hit_over_unlimited",
    "prefill_s",
    "failed",
)
RATIOS: Final = (
    "ttft_later_over_re",
    "ttft_later_over_bound",
    "throughput_over_re",
    "prefill_over_re",
    "prefill_over_bound",
)
OVER: Final = {"ttft_later_over_lmcache": "lmcache", "ttft_later_over_vllm": "vllm"}
VALUES: Final = (*PER_SYSTEM, *RATIOS, *OVER)


def kind() -> str:
    return "CPU" if is_cpu_build() else "GPU"


def run(experiment: Experiment, data: Path, *, model: str | None = None) -> dict[str, Any]:
    """{metric: {point: {system: value}}}, and what it was made of.

    Args:
        model: as for vllm serve; in place of the small one that is made.
    Raises: SpecError, InterruptedError if a comparison could not be done.
    """
    unknown = [m.name for m in experiment.metrics if m.name not in VALUES]
    if unknown:
        raise SpecError(f"{experiment.name}: no such metric: {unknown}; there are {list(VALUES)}")
    body = experiment.body
    path = model or _made(experiment.name, body.get("model", "medium"))
    comparisons: dict[str, Any] = {}
    for number, (label, given) in enumerate(body["points"].items()):
        out = WORK / experiment.name / str(number)
        if "history" in given:
            data = made_of_ids(out, body["conversations"], given["history"], given["new"])
        options = [*body.get("options", []), *given.get("options", [])]
        code = compare(
            [
                "--model",
                path,
                "--data",
                str(data),
                "--out",
                str(out),
                *map(str, options),
            ]
        )
        if code not in (OK, FAILED):
            raise InterruptedError(f"{experiment.name}, {label}: the comparison ended with {code}")
        found = json.loads((out / "compare.json").read_text())
        # Options are in `body`; here they have paths of this machine, as the logs' ends have.
        found["not_run"] = {k: why.splitlines()[0] for k, why in found["not_run"].items()}
        comparisons[label] = {k: v for k, v in found.items() if k not in ("options", "machine")}
    measured: dict[str, Any] = values(experiment, comparisons)
    if body.get("together"):
        folders = [WORK / experiment.name / str(number) for number in range(len(body["points"]))]
        for name, row in together(folders, [m.name for m in experiment.metrics]).items():
            measured[name][body["together"]] = row
    return {
        **data_facts(data),
        "model": model or body.get("model", "medium"),
        "values": measured,
        "not_run": {k: v for c in comparisons.values() for k, v in c["not_run"].items()},
        "comparisons": comparisons,
    }


def made_of_ids(directory: Path, conversations: int, history: int, new: int) -> Path:
    """Conversations of two questions of random ids: `history` tokens, then `new` ones."""
    rng = Random(f"{history}/{new}")
    made = [
        {"id": str(n), "conversations": [
            {"from": "human", "value": [rng.randrange(*IDS) for _ in range(count)]}
            for count in (history, new)
        ]}
        for n in range(conversations)
    ]  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "conversations.json"
    path.write_text(json.dumps(made))
    return path


def values(
    experiment: Experiment, comparisons: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, float | None]]]:
    return {
        metric.name: {
            label: {
                name: value_of(metric.name, found["systems"], name) for name in found["systems"]
            }
            for label, found in comparisons.items()
        }
        for metric in experiment.metrics
    }


def together(folders: Sequence[Path], metrics: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """The TTFT of later turns over all points as one: the median and its interval, by metric and
    system. See intervals.py.

    Args:
        folders: of the comparisons, with the records of each system in a file.
    """
    files = {path.stem for folder in folders for path in folder.glob("*.jsonl")}
    turns = {
        name: later_turns(
            map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
            for folder in folders
        )
        for name in sorted(files)
        if all((folder / f"{name}.jsonl").exists() for folder in folders)
    }
    found: dict[str, dict[str, list[float]]] = {}
    if "ttft_later_p50" in metrics:
        found["ttft_later_p50"] = {name: _rounded(interval(of)) for name, of in turns.items()}
    for metric, other in OVER.items():
        if metric in metrics and other in turns:
            over = turns[other]
            found[metric] = {name: _rounded(interval(of, over)) for name, of in turns.items()}
    return found


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def value_of(metric: str, systems: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Of one system, among those of a comparison's JSON."""
    system = systems[name]
    if metric in RATIOS:
        ratio: float | None = system["ratios"][metric]
        return ratio
    if metric not in OVER:
        figure: float | None = system["figures"][metric]
        return figure
    theirs = systems.get(OVER[metric], {"figures": {}})["figures"].get("ttft_later_p50")
    ours = system["figures"]["ttft_later_p50"]
    return None if theirs is None or ours is None else round(ours / theirs, 4)


def _made(name: str, shape: str) -> str:
    if shape not in SHAPES:
        raise SpecError(f"{name}: model {shape!r} is unknown; there are {', '.join(SHAPES)}")
    return str(make_model(WORK / "models" / shape, SHAPES[shape]))
