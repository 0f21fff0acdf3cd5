# SPDX-License-Identifier: Apache-2.0
"""The same faults for every KV connector that runs here: who serves what?

    python -m benchmarks.audit_others                            # all, with progress
    python -m benchmarks.audit_others --only example weights     # one cell
    python -m benchmarks.audit_others --docs                     # the page's table; runs nothing

Each cell is a story of real engines, one after the other, each in a process of its own: prompts are
answered and stored, the fault is made, the same prompts are asked again. The answers are compared
with those of a fresh engine without a connector that has the new settings. HBM is emptied and
filled with garbage before each prompt, so what is not computed comes from the connector.

    served right    tokens came from the connector, and all answers are right
    served WRONG    an answer is another one
    computed        nothing was served; all answers are right
    refused         the engine does not start behind the fault
    engine ended    a request behind the fault ends with an error, and the engine with it
    n/a             the fault cannot reach it, e.g. it keeps nothing after its process
    does not run    it fails here with no fault at all

How it is told. *Served* is `num_cached_tokens` of the request, since HBM has nothing of it. *Right*
is a drift within rounding: the largest difference of a log-probability of the five candidates of
each of 8 greedy tokens, up to the first token that differs (benchmarks/rounding.py). What is
rounding is learned without a connector: the same prompts with their prefix in HBM and in another
split of the prefill drift by so much; twice that is allowed, and at least 0.25 nats. Wrong KV moves
these models by several nats, since their answers hang on single tokens. A fault that should change
the answers is checked first: without a connector they must drift by more than rounding. And what is
wrong behind other settings must be right over what it stored with those settings itself.

Fair. Settings are the defaults of each, but for sizes and paths. For this store three settings are
not: `compute_if_sooner: false`, without which it would compute such short prompts, a longer
deadline for a slow machine, and `audit: off`, so that keys and checksums alone are seen. No fault
breaks a rule that vLLM gives to clients (a `uuid` of media must be unique). Damages are the
same for all: of whole chunks in its files (others_parts/damage.py). LMCache's daemon is started
anew with each engine, over the files that the one before left.

Each cell is written as it comes; a run of some keeps what the file says of others. The file names
date, commit and version of each cell. Where LMCache is not installed, or a connector needs a GPU,
its cells say why. The whole of it takes 16 minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from attnstore_lab.bench.environment import machine
from benchmarks.compare.lmcache import QUIET
from benchmarks.others_parts.faults import FAULTS, Fault, Lab, try_fault
from benchmarks.others_parts.judge import Cell, absent, table, words
from benchmarks.others_parts.systems import SYSTEMS, System
from benchmarks.quick import RESULTS

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "compared.md"
BEGIN, END = "<!-- benchmarks.audit_others -->", "<!-- end -->"

Result = dict[str, Any]


def sweep(systems: Sequence[str], faults: Sequence[str], path: Path) -> Result:
    """Try them all, one after the other; write the file after each."""
    result: Result = json.loads(path.read_text()) if path.exists() else {}
    result.setdefault("systems", {})
    with tempfile.TemporaryDirectory(prefix="attnstore-others-", dir="/var/tmp") as work:
        lab = Lab(Path(work))
        for name in systems:
            found: Cell | None = None
            for fault in faults:
                if found is None or name in lab.serving:
                    found = _told(lab, SYSTEMS[name], FAULTS[fault])
                _keep(result, name, fault, found)  # what does not run, does not for any fault
                write(path, result)
    return result


def _told(lab: Lab, system: System, fault: Fault) -> Cell:
    began = time.monotonic()
    print(f"{system.name} {fault.name} ... ", end="", file=sys.stderr, flush=True)
    cell = try_fault(lab, system, fault)
    seconds = time.monotonic() - began
    print(f"{words(asdict(cell))}  {cell.why}  ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return cell


def _keep(result: Result, name: str, fault: str, cell: Cell) -> None:
    system = result["systems"].setdefault(name, {"cells": {}})
    system.update(words=SYSTEMS[name].words, version=SYSTEMS[name].version)
    here = machine()
    kept = asdict(cell) | {
        "drift": round(cell.drift, 3) if math.isfinite(cell.drift) else "not a number",
        "limit": round(cell.limit, 3),
        "date": datetime.now(UTC).date().isoformat(), "commit": here["commit"],
        "command": f"python -m benchmarks.audit_others --only {name} {fault}",
    }  # fmt: skip
    cells = system["cells"] | {fault: kept}
    system["cells"] = {known: cells[known] for known in FAULTS if known in cells}
    result["machine"] = here
    result["systems"] = {n: result["systems"][n] for n in SYSTEMS if n in result["systems"]}


def write(path: Path, result: Result) -> None:
    """All at once: what is stopped meanwhile leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    part.replace(path)


def rendered(result: Result) -> str:
    """For the page: when and where, the table, and which systems are not in it."""
    systems = result["systems"]
    dates = sorted({c["date"] for s in systems.values() for c in s["cells"].values()})
    versions = sorted({s["version"] for s in systems.values() if s["version"]})
    here = result["machine"]
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    where = f"{here['cores']} cores of {here['cpu']}, Python {here['python']}"
    told = {name: fault.words for name, fault in FAULTS.items()}
    missing = [f"- `{name}` did not run: {why}" for name, why in absent(result).items()]
    head = f"*{when}, {where}; {', '.join(versions)}.*"
    return "\n".join([head, "", table(result, told), "", *missing])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit_others",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar=("SYSTEM", "FAULT"),
                        help=f"{', '.join(SYSTEMS)}; {', '.join(FAULTS)} (all)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / "audit_others.json")
    parser.add_argument("--docs", action="store_true", help="write the page's table, run nothing")
    args = parser.parse_args(argv)
    if args.docs:
        result = json.loads(args.out.read_text())
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
        return 0
    system, *faults = args.only or [None]
    if system not in {None, *SYSTEMS} or not set(faults) <= set(FAULTS):
        parser.error(f"--only {' '.join(args.only)}: there is no such cell")
    os.environ.update(QUIET)
    print(rendered(sweep([system] if system else list(SYSTEMS), faults or list(FAULTS), args.out)))
    return 0


def with_table(page: str, result: Result) -> str:
    """The page, with this result's table between its marks."""
    text = f"{BEGIN}\n{rendered(result)}\n{END}"
    made, count = re.subn(f"{BEGIN}.*{END}", lambda _: text, page, flags=re.DOTALL)
    assert count == 1, f"{PAGE} has no place for the table"
    return made


if __name__ == "__main__":
    sys.exit(main())
