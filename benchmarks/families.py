# SPDX-License-Identifier: Apache-2.0
"""Every kind of model that vLLM starts here, with the store and without: served, or idle?

    python -m benchmarks.families [--quick] [--only NAME ...] [--json FILE] [--docs]

Small models of the families (attnstore_lab/testing/family_models.py), and one for each other
architecture of vLLM's registry whose configuration transformers can make small. Each runs twice,
in a process of its own with a time limit: one prompt, the same again, one that shares 1,500 tokens
with it, the next turn; with the store vLLM's own cache is emptied before each. What may come of it:

    served   tokens came from the store, and all answers are those of the run without it
    idle     nothing came from it; the log says why; answers are those of the run without it
    fails    vLLM fails without the store too
    dead     it fails with the store only: a bug of ours
    wrong    answers differ by more than runs without the store do among themselves: a bug of ours
    silent   nothing came from it, and the log does not say why: a bug of ours

--only runs these and keeps what the file says of others. --docs writes docs/models.md from it.
Each result is written as it comes, with its commit: --resume goes on with a sweep that was stopped.
The whole of it takes half an hour where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tqdm import tqdm

from attnstore_lab.bench.environment import machine
from attnstore_lab.testing.family_models import DRAFTS, FAMILIES
from benchmarks.family_parts import child, registry
from benchmarks.family_parts.child import drift
from benchmarks.family_parts.table import render
from benchmarks.quick import RESULTS, destination

ROOT: Final = Path(__file__).parent.parent
LIMIT_S: Final = 180
QUICK: Final = ("llama", "gemma3", "gpt_oss", "qwen3_next", "gemma4_hybrid_off", "deepseek_v2")
MARGIN: Final = 4.0
FLOORS: Final = {"float32": 2e-5, "bfloat16": 0.03}
"""Nats of log-probability that count as rounding, whatever was measured."""
BUGS: Final = ("dead", "wrong", "silent")
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}
IDLE: Final = re.compile(r"AttnStore is idle.*?, since (.+)")
ERROR: Final = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
REFUSED: Final = re.compile(r"^ +(Value error, .+?)(?: \[type=.*)?$", re.MULTILINE)
FRAME: Final = re.compile(
    r'^ +File ".*/site-packages/vllm/(.+?)", line \d+, in (\S+)\n +(.+)$', re.M
)
WORDS: Final = 160

Result = dict[str, Any]


def left_to_do(names: Sequence[str], known: Mapping[str, Result], commit: str) -> list[str]:
    """Those without a result that was found at this commit, of which the first digits do."""
    return [n for n in names if not str(known.get(n, {}).get("commit", "")).startswith(commit)]


def sweep(
    names: Sequence[str], models: Path, known: Mapping[str, Result]
) -> Iterator[dict[str, Result]]:
    """After each family, all results in the order of the page: found now or known before."""
    found, order, commit = dict(known), [*FAMILIES, *registry.others()], machine()["commit"]
    bar = tqdm(names, unit="family")
    for name in bar:
        bar.set_description(name)
        began = time.monotonic()
        found[name] = try_family(name, models)
        found[name]["seconds"] = round(time.monotonic() - began, 1)
        found[name]["commit"] = commit
        bar.write(f"{name}: {found[name]['outcome']}  {found[name].get('why', '')}", sys.stdout)
        sys.stdout.flush()
        yield {name: found[name] for name in order if name in found}


def write(path: Path, results: Mapping[str, Any]) -> None:
    """All at once: what is stopped meanwhile leaves what was there."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def try_family(name: str, models: Path) -> Result:
    with tempfile.TemporaryDirectory(prefix="families-") as directory:
        with_store, log = _child(name, models, Path(directory) / "store")
        without, plain_log = _child(name, models, None)
    result: Result = _about(name)
    if without is None:
        result.update(outcome="fails", why=_error(plain_log))
        return result
    result["groups"] = without["groups"]
    result["own"] = without["found"]
    if with_store is None:
        result.update(outcome="dead", why=_error(log))
        return result
    noise = max(without["noise"], with_store["noise"])
    limit = MARGIN * max(noise, FLOORS[without["dtype"]])
    drifts = [drift(a, b) for a, b in zip(with_store["answers"], without["answers"], strict=True)]
    reason = IDLE.search(log)
    result.update(found=with_store["found"], noise=noise, drift=max(drifts))
    if not max(drifts) <= limit:
        result.update(outcome="wrong", why=f"drifts {drifts}, rounding up to {limit:.1e}")
    elif any(with_store["found"]):
        result["outcome"] = "served"
    else:
        result["outcome"] = "idle" if reason else "silent"
        result["why"] = reason[1].strip() if reason else ""
    return result


def _about(name: str) -> Result:
    if name in FAMILIES:
        family = FAMILIES[name]
        return {"stands_for": family.stands_for, "dtype": family.dtype, "weights": family.weights}
    return {"stands_for": name, "dtype": "bfloat16", "weights": "dummy"}


def _child(name: str, models: Path, store: Path | None) -> tuple[Result | None, str]:
    """What one run says, None if it fails; and its log."""
    with tempfile.TemporaryDirectory(prefix="families-") as directory:
        out, log = Path(directory) / "out.json", Path(directory) / "log"
        process = _forking().Process(target=child.run, args=(name, models, out, log, store))
        process.start()
        process.join(LIMIT_S)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        text = log.read_text(errors="replace") if log.exists() else ""
        if late:
            text += f"\nTimeoutError: not over within {LIMIT_S} s\n"
        if process.exitcode != 0 or not out.exists():
            return None, text
        return json.loads(out.read_text()), text


@cache
def _forking() -> ForkServerContext:
    """Children are forked from one process that has imported vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm.preload"])
    with mock.patch.dict(os.environ, ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}):
        forkserver.ensure_running()
    return context


def _error(log: str) -> str:
    """The last error in vLLM's words, and where in vLLM: those before are what it was made of."""
    found = [line for line in ERROR.findall(log) if "Engine core init" not in line]
    if not found:
        return "it ended without a word"
    last, refused = found[-1].strip(), REFUSED.findall(log)
    if last.startswith("ValidationError") and refused:  # its own line has only a number of errors
        return refused[-1][:WORDS].strip()
    frames = FRAME.findall(log)
    if not frames:
        return last[:WORDS].strip()
    file, function, line = frames[-1]
    words = f"{last}: {line}" if last == "AssertionError" else last
    return f"{words[:WORDS].strip()} (vllm/{file}, {function})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--families", action="store_true", help="not the rest of the registry")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=machine()["commit"],
        metavar="COMMIT",
        help="only those without a result of this commit in the file (default: HEAD)",
    )
    parser.add_argument(
        "--json", type=Path, help="(results/families.json; of --quick, .cache/quick)"
    )
    parser.add_argument("--models", type=Path, default=ROOT / ".cache" / "families")
    parser.add_argument("--docs", action="store_true", help="write docs/models.md, run nothing")
    args = parser.parse_args(argv)
    args.json = destination(
        RESULTS / "families.json", args.json, is_quick=args.quick and not args.docs
    )
    before: Mapping[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    if not args.docs:
        known = dict(before.get("families", {}))
        families = [name for name in FAMILIES if name not in DRAFTS]
        everything = families if args.families else [*families, *registry.others()]
        names = list(args.only or (QUICK if args.quick else everything))
        if args.resume:
            names = left_to_do(names, known, args.resume)
        for found in sweep(names, args.models, known):
            before = {"machine": machine(), "families": found}
            write(args.json, before)
    text = render(before["families"])
    print(text)
    if args.docs:
        (ROOT / "docs" / "models.md").write_text(text, encoding="utf-8")
    return int(any(r["outcome"] in BUGS for r in before["families"].values()))


if __name__ == "__main__":
    sys.exit(main())
