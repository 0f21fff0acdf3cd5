# SPDX-License-Identifier: Apache-2.0
"""Draw every picture of results/ and docs/images again, of its results file. Nothing is measured.

    python -m benchmarks.pictures [--out DIR]

docs/images has three more, drawn by hand: tiers.svg, turn.svg and truncation.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from attnstore_lab.cli import simulate_hosts
from benchmarks import demo_report, hero
from benchmarks.experiments import picture as experiment_picture
from benchmarks.experiments.spec import read_all
from benchmarks.overlap_parts import hits
from benchmarks.overlap_parts import picture as overlap_picture
from benchmarks.quality import document_report
from benchmarks.quality import picture as quality_picture

ROOT: Final = Path(__file__).resolve().parent.parent
Draw = Callable[[Any, Path], None]


def _written(make: Callable[[Mapping[str, Any]], str], result: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make(result), encoding="utf-8")


def _overlap(result: Any, path: Path) -> None:
    overlap_picture.draw(result["hits"]["result"], hits.GOAL, path)


def pictures() -> dict[str, tuple[str, Draw]]:
    """By path of the picture: its results file, and what draws it."""
    found: dict[str, tuple[str, Draw]] = {
        "docs/images/hero.svg": ("results/demo.json", partial(_written, hero.hero)),
        "docs/images/restart.svg": ("results/restart.json", partial(_written, hero.restart)),
        "results/demo.svg": ("results/demo.json", demo_report.plot),
        "results/hosts_mooncake.svg": ("results/hosts_mooncake.json", simulate_hosts.plot),
        "results/hosts_sharegpt.svg": ("results/hosts_sharegpt.json", simulate_hosts.plot),
        "results/overlap.svg": ("results/overlap.json", _overlap),
        "results/quality.svg": ("results/quality.json", quality_picture.draw),
        "results/quality_documents.svg": ("results/quality_documents.json", document_report.draw),
    }
    for name, experiment in read_all().items():
        stem = f"results/experiments/{name}"
        file = ROOT / f"{stem}.json"
        if file.exists() and experiment_picture.says_something(
            experiment, json.loads(file.read_text(encoding="utf-8"))
        ):
            found[f"{stem}.svg"] = f"{stem}.json", partial(experiment_picture.plot, experiment)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT, metavar="DIR", help="(the repository)")
    args = parser.parse_args()
    for path, (file, draw) in pictures().items():
        draw(json.loads((ROOT / file).read_text(encoding="utf-8")), args.out / path)
        print(f"{path}: {file}")


if __name__ == "__main__":
    main()
