# SPDX-License-Identifier: Apache-2.0
"""Run experiments of the paper's evaluation; each writes results/experiments/NAME.json and .svg,
and ends with its tables, its goals and a verdict. What is run quickly is written to .cache/quick.

python -m benchmarks.experiments                       what there is
python -m benchmarks.experiments hit_rate ttft         some
python -m benchmarks.experiments --all                 all: hours
python -m benchmarks.experiments --all --quick         all, small: to see that they run
python -m benchmarks.report                            then docs/experiments.md
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attnstore_lab.bench.environment import machine
from attnstore_vllm.errors import AttnStoreError
from benchmarks.experiments import scripted, served, simulated
from benchmarks.experiments.picture import plot, says_something
from benchmarks.experiments.spec import Experiment, Kind, SpecError, read_all
from benchmarks.placement import DATASETS
from benchmarks.quick import RESULTS, destination
from benchmarks.report import ending

PUBLISHED: Final = RESULTS / "experiments"
EXIT_OK, EXIT_ERROR = 0, 2
HOW: Final[Mapping[Kind, str]] = {
    "simulate": "simulated",
    "serve": "real servers",
    "script": "measured",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if one could not be run."""
    args = _arguments(argv)
    try:
        experiments = read_all()
        names = list(experiments) if args.all else args.names
        if not names:
            show(experiments)
            return EXIT_OK
        for name in names:
            if name not in experiments:
                raise SpecError(f"{name!r} is unknown; there are {', '.join(experiments)}")
        data = args.data or next(path for path in DATASETS if path.exists())
        args.out = destination(PUBLISHED, args.out, is_quick=args.quick)
        for name in names:
            experiment = experiments[name].quickly() if args.quick else experiments[name]
            _run(experiment, data, args)
    except (AttnStoreError, OSError) as error:
        print(f"benchmarks.experiments: {error}", file=sys.stderr)
        return EXIT_ERROR
    return EXIT_OK


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small; proves nothing but itself")
    parser.add_argument(
        "--kept",
        action="store_true",
        help="of experiments that another benchmark answers: take what it left in results/",
    )
    parser.add_argument("--data", type=Path, help="conversations in ShareGPT format")
    parser.add_argument("--model", help="for real servers, as for vllm serve (a small one is made)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="(results/experiments; of --quick, .cache/quick)"
    )
    return parser.parse_args(argv)


def show(experiments: Mapping[str, Experiment]) -> None:
    for name, experiment in experiments.items():
        print(f"{name:20}{HOW[experiment.kind]:14}{experiment.question}")


def _run(experiment: Experiment, data: Path, args: argparse.Namespace) -> None:
    started = time.perf_counter()
    if experiment.kind == "simulate":
        found, kind = simulated.run(experiment, data), "simulated"
    elif experiment.kind == "serve":
        found, kind = served.run(experiment, data, model=args.model), served.kind()
    else:
        found, kind = scripted.run(experiment, kept=args.kept), served.kind()
    result: dict[str, Any] = {
        "experiment": experiment.name,
        "kind": kind,
        "quick": args.quick,
        "command": experiment.command
        + "".join(f" --{name}" for name in ("quick", "kept") if getattr(args, name)),
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(),
        "body": experiment.body,
        **found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{experiment.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if says_something(experiment, result):
        plot(experiment, result, path.with_suffix(".svg"))
    print("\n".join(ending(experiment, result)))
    print(f"{experiment.name}: {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
