# SPDX-License-Identifier: Apache-2.0
"""Experiments that another benchmark of this repository answers: it is run, and its JSON is read.

script:
  module: benchmarks.overlap
  arguments: [--only, read_buffer]
  out: --out                    # its option for the file it writes ...
  results: overlap.json         # ... in results/
  about: read_buffer            # where in it machine and seconds are told
  points:
    8 layers: {some_metric: {attnstore: read_buffer/result/models/0/with_over_without/median}}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.experiments.spec import Experiment, SpecError

ROOT: Final = Path(__file__).parent.parent.parent
RESULTS: Final = ROOT / "results"
WORK: Final = ROOT / ".cache" / "experiments"


def run(experiment: Experiment, *, kept: bool, results: Path = RESULTS) -> dict[str, Any]:
    """{metric: {point: {system: value}}}, and what it was made of.

    Args:
        kept: read what the benchmark left in `results` when it ran last, and do not run it.
    Raises: SpecError; InterruptedError if the benchmark could not be run.
    """
    body = experiment.body
    path = results / body["results"] if kept else WORK / experiment.name / body["results"]
    if not kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", body["module"], *map(str, body.get("arguments", []))]
        code = subprocess.run([*command, body["out"], str(path)], cwd=ROOT, check=False).returncode
        if code:
            raise InterruptedError(f"{experiment.name}: {' '.join(command)} ended with {code}")
    found = json.loads(path.read_text())
    about = at(experiment.name, found, body.get("about", ""))
    return {
        "data": body["module"],
        "machine": about["machine"],
        "seconds": about["took_s"],
        "values": values(experiment, found),
    }


def values(experiment: Experiment, found: Any) -> dict[str, dict[str, dict[str, float | None]]]:
    return {
        metric.name: {
            label: {
                system: float(at(experiment.name, found, path))
                for system, path in given.get(metric.name, {}).items()
            }
            for label, given in experiment.body["points"].items()
            if metric.name in given
        }
        for metric in experiment.metrics
    }


def at(name: str, found: Any, path: str) -> Any:
    """What is at "a/0/b" of a JSON. Raises: SpecError."""
    for part in path.split("/") if path else ():
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            there: Any = list(found) if isinstance(found, Mapping) else type(found).__name__
            raise SpecError(f"{name}: {path}: there is no {part!r}; there is {there}") from error
    return found
