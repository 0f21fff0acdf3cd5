# SPDX-License-Identifier: Apache-2.0
"""Real `vllm serve` with the store and without: the same answers, and what a hit costs.

    make gpu-e2e ARGS="[--cpu] [--only NAME ...] [--json] [--out FILE] [--small] [--list]"
    make gpu-e2e ARGS="--quick [--budget SECONDS] [--cpu] [--json] [--out FILE] [--small]"

With the Python that has PyTorch for CUDA, vLLM and this package (GPU_PYTHON, else python3). Without
one of them it says so in one line and ends with 2; with 1 if a case failed, or none was right. A
goal that is missed is a line of the table.

A case is a way to start the server. Each is asked computed, from DRAM, in crowds with too little
HBM in which some go away, and after a restart from NVMe. The last three cases measure. A case that
does not end in its time is ended, with its servers; those after it are tried all the same. After
each case the results are written: to results/gpu.json, from which tools/readme_results.py makes
the README's table; cases that are still to come are there as "not run". A run with --only keeps
what is there of the same machine and versions.

--quick is one run in 480 seconds (benchmarks/e2e/quick.py), written to .cache/quick/gpu.json or
to --out.

--cpu runs the cases that the CPU build has, with tiny models. --wrong-bytes plants one wrong bit
in each load: then cases have to fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from attnstore_lab.bench.environment import machine
from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.preflight import SHM_DIR, memory_available, shared_memory
from benchmarks import gpu_check
from benchmarks.e2e.answers import Answers, NotHere, Prompted, Tried, Wrong
from benchmarks.e2e.cases import CASES, LLAMA_1B, ON_CPU, ON_GPU, SWITCHED
from benchmarks.e2e.figures import Row, show
from benchmarks.e2e.quick import BUDGET_S, Quick
from benchmarks.e2e.serving import Deadline, Late, Setup
from benchmarks.e2e.sides import Need
from benchmarks.e2e.speeds import Got, Speeds
from benchmarks.quick import RESULTS, destination
from benchmarks.server import ServerError, is_cpu_build, vllm_command

ROOT: Final = Path(__file__).resolve().parent.parent
MEASURED: Final = ("hits", "throughput", "copies")
NAMES: Final = (*CASES, *MEASURED)
DEADLINE_S: Final = 1_200.0
MISSING: Final = 2
ENDED: Final = "the run ended before it"


def why_not(*, is_cpu: bool) -> str | None:
    """The sentence that says what is missing to run anything; None if nothing is."""
    if not is_cpu and (missing := gpu_check.why_not()) is not None:
        return missing
    try:
        vllm_command()
    except ServerError as error:
        return str(error)
    if is_cpu != is_cpu_build():
        built = "for CPUs: --cpu runs it" if is_cpu_build() else "not for CPUs: leave --cpu away"
        return f"the vLLM that is installed here is built {built}"
    return None


class Run:
    """The cases that were asked for, one after the other."""

    def __init__(self, setup: Setup, *, small: bool, deadline_s: float) -> None:
        self._setup = setup
        self._deadline_s = deadline_s
        self._answers = Answers(setup, Prompted.of(setup.size))
        self._speeds = Speeds(setup, small)

    def try_one(self, name: str) -> Row:
        """Never raises for what a case does."""
        row, began = Row(name), time.monotonic()
        try:
            if why := self._why_skipped(name):
                raise NotHere(why)
            with Deadline(self._deadline_s) as deadline:
                self._try(name, deadline, row)
        except NotHere as reason:
            row.outcome, row.why = "skipped", str(reason)
        except (Wrong, Late) as reason:
            row.outcome, row.why = "failed", str(reason)
        except Exception as error:  # the next case may work
            row.outcome, row.why = "failed", f"{type(error).__name__}: {error}"[-1500:]
        row.seconds = time.monotonic() - began
        return row

    def _try(self, name: str, deadline: Deadline, row: Row) -> None:
        measured: dict[str, Callable[[Deadline, Tried, Got], None]] = {
            "hits": self._speeds.hits,
            "throughput": self._speeds.throughput,
            "copies": self._speeds.copies,
        }
        if name in measured:
            measured[name](deadline, row.tried, row.figures.append)
        elif name == SWITCHED:
            self._answers.try_switch(name, deadline, row.tried)
        else:
            self._answers.try_case(name, deadline, row.tried)

    def _why_skipped(self, name: str) -> str:
        case = CASES.get(name)
        if case is None:
            return ""
        if self._setup.is_cpu:
            if case.why_not_cpu:
                return case.why_not_cpu
            there, what = len(self._setup.cores), "processors"
        else:
            there, what = _num_gpus(), "GPUs"
        return f"needs {case.gpus} {what}, and {there} is here" if there < case.gpus else ""


def _num_gpus() -> int:
    import torch  # noqa: PLC0415

    return int(torch.cuda.device_count())


def about(*, is_cpu: bool) -> dict[str, Any]:
    """The machine and the versions: what a row is true of."""
    found = machine() if is_cpu else {**machine(), **gpu_check.machine(), "gpus": _num_gpus()}
    return {"is_cpu": is_cpu, **found}


def kept(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Rows of an earlier run with the same machine and versions, by name."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["machine"] == here:
            return {row["name"]: row for row in before["cases"]}
    return {}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make gpu-e2e",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cpu", action="store_true", help="the CPU build of vLLM, tiny models")
    parser.add_argument("--quick", action="store_true", help="one run within --budget")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of --quick")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("--small", action="store_true", help="for GPUs with little memory")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds a case")
    parser.add_argument("--out", type=Path, help="results/gpu.json; with --cpu nowhere")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this directory")
    parser.add_argument("--wrong-bytes", action="store_true", help="plant a wrong bit in each load")
    args = parser.parse_args()
    if args.quick and args.only:
        parser.error("--quick has cases of its own: leave --only away")
    return args


def main() -> int:
    args = _parse()
    if args.list:
        print("\n".join(NAMES))
        return 0
    missing = why_not(is_cpu=args.cpu)
    if missing is not None:
        print(f"gpu-e2e: {missing}; nothing was run", file=sys.stderr)
        return MISSING
    here = about(is_cpu=args.cpu)
    out = args.out
    if not args.cpu and not args.wrong_bytes:
        out = destination(RESULTS / "gpu.json", out, is_quick=args.quick)
    if args.quick:
        return _quick(args, here, out)
    found = kept(out, here) if out is not None and args.only else {}
    with tempfile.TemporaryDirectory(prefix="attnstore-e2e-", dir="/var/tmp") as directory:
        run = Run(_setup(args, Path(directory)), small=args.small, deadline_s=args.deadline)
        asked = [name for name in NAMES if args.only is None or name in args.only]
        found |= {name: Row(name, outcome="not run", why=ENDED).to_json() for name in asked}
        for name in asked:
            print(f"gpu-e2e: {name} ...", file=sys.stderr, flush=True)
            row = run.try_one(name)
            print(f"gpu-e2e: {name}: {row.outcome} {row.why}"[:400], file=sys.stderr, flush=True)
            found[name] = row.to_json()
            result = {"machine": here, "cases": [found[n] for n in NAMES if n in found]}
            _write(out, result)
    return tell(args, result, [found[name] for name in asked])


def _write(out: Path | None, result: dict[str, Any]) -> None:
    """Whole or not at all: a run may be interrupted."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(out)


def tell(args: argparse.Namespace, result: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    """The exit status."""
    print(json.dumps(result) if args.json else f"{result['machine']}\n\n{show(rows)}")
    outcomes = {row["outcome"] for row in rows}
    return int(bool(outcomes & {"failed", "not run"}) or "ok" not in outcomes)


def _quick(args: argparse.Namespace, here: dict[str, Any], out: Path | None) -> int:
    free = memory_available()
    shm = int(0.9 * min(shared_memory(SHM_DIR).free_bytes, free))
    hbm, total = (free, 0) if args.cpu else _hbm()
    result: dict[str, Any] = {"machine": here, "is_quick": True, "budget_s": args.budget}

    def wrote(rows: list[Row]) -> None:
        result["cases"] = [row.to_json() for row in rows]
        _write(out, result)

    with tempfile.TemporaryDirectory(prefix="attnstore-e2e-", dir="/var/tmp") as directory:
        setup = _setup(args, Path(directory))
        Quick(setup, args.budget, Need(hbm, shm), total, wrote).run()
    return tell(args, result, result["cases"])


def _hbm() -> tuple[int, int]:
    """Bytes that are free, and all."""
    import torch  # noqa: PLC0415

    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def _setup(args: argparse.Namespace, work: Path) -> Setup:
    size = ON_CPU if args.cpu else replace(ON_GPU, timed=LLAMA_1B) if args.small else ON_GPU
    logs = args.logs or work
    logs.mkdir(parents=True, exist_ok=True)
    return Setup(
        size,
        work,
        make_model(work / "model", size.shape),
        args.cpu,
        sorted(os.sched_getaffinity(0)),
        "wrong_bytes" if args.wrong_bytes else None,
        logs,
    )


if __name__ == "__main__":
    sys.exit(main())
