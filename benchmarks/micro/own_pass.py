# SPDX-License-Identifier: Apache-2.0
"""A forward pass of our own (connector/own_pass.py) over vLLM's own step, of as many tokens.

    python -m benchmarks.micro.own_pass [--layers 8] [--rounds 9] [--json] [--out PATH]

vLLM computes a prompt of six documents of 512 tokens with gaps of 24 between, and its first token.
A pass of ours computes all of it, or parts, in other blocks of HBM. They take turns, in one process
and on the same processors; a ratio is of one round.

    all              one row
    none             the gaps alone, a row each: documents are there
    first 15 %       each gap with the first 15 % of the document behind it
    scattered 15 %   as many tokens, most of them alone in their row
    in groups 15 %   as many tokens, in groups as they are chosen
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER
from benchmarks.documents import END_WORD, FIRST_WORD, GAP, LENGTH, shape_of
from benchmarks.report import machine
from benchmarks.server import quiet_cpu_environment

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS, BLOCK_TOKENS = 6, 128
GOALS = {"all": 1.05}


def parts() -> dict[str, list[range]]:
    """The tokens that each kind of pass computes, in runs."""
    starts = [n * (GAP + LENGTH) for n in range(DOCUMENTS)]
    share = -(-LENGTH * 15 // 100)
    chosen = Random(3).sample(range(GAP, GAP + LENGTH), share)
    scattered = [at + n for at in starts for n in [*range(GAP), *sorted(chosen)]]
    firsts = Random(3).sample(
        range(GAP, GAP + LENGTH, CHOSEN_TOGETHER), -(-share // CHOSEN_TOGETHER)
    )
    groups = [first + n for first in sorted(firsts) for n in range(CHOSEN_TOGETHER)][:share]
    return {
        "all": [range(DOCUMENTS * (GAP + LENGTH))],
        "none": [range(at, at + GAP) for at in starts],
        "first 15 %": [range(at, at + GAP + share) for at in starts],
        "scattered 15 %": list(_runs(scattered)),
        "in groups 15 %": list(_runs([at + n for at in starts for n in [*range(GAP), *groups]])),
    }


def _runs(positions: list[int]) -> list[range]:
    runs: list[range] = []
    for at in positions:
        if runs and runs[-1].stop == at:
            runs[-1] = range(runs[-1].start, at + 1)
        else:
            runs.append(range(at, at + 1))
    return runs


def own_pass(worker: Any, tokens: list[int], runs: list[range]) -> float:
    """Seconds of a pass; in blocks of HBM that no request has."""
    from attnstore_vllm.connector.own_pass import make_own_pass  # noqa: PLC0415
    from attnstore_vllm.transfer.plan import TokenRun  # noqa: PLC0415

    runner = worker.model_runner
    if not hasattr(worker, "own_pass_of_ours"):
        layers = runner.compilation_config.static_forward_context
        worker.own_pass_of_ours = make_own_pass(
            runner.vllm_config, runner.kv_cache_config, layers, runner.get_model()
        )
    given = [TokenRun(run.start, tuple(tokens[run.start : run.stop])) for run in runs]
    blocks = list(range(1, 2 + len(tokens) // BLOCK_TOKENS))
    began = time.perf_counter()
    worker.own_pass_of_ours.compute(given, [blocks])
    return time.perf_counter() - began


def measure(layers: int, rounds: int, work: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    model = make_model(work / "model", shape_of(layers))
    llm = LLM(
        str(model), skip_tokenizer_init=True, max_model_len=8192, max_num_batched_tokens=8192,
        num_gpu_blocks_override=96, block_size=BLOCK_TOKENS, enable_prefix_caching=False,
        disable_log_stats=True,
    )  # fmt: skip
    random, kinds = Random(5), parts()
    length = kinds["all"][0].stop
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    times: dict[str, list[float]] = {"vLLM": [], **{kind: [] for kind in kinds}}
    for _ in tqdm(range(rounds + 1), unit="round"):
        tokens = [random.randrange(FIRST_WORD, END_WORD) for _ in range(length)]

        def step(tokens: list[int] = tokens) -> float:
            began = time.perf_counter()
            llm.generate({"prompt_token_ids": tokens}, one, use_tqdm=False)
            return time.perf_counter() - began

        for kind in random.sample(list(times), len(times)):
            if kind == "vLLM":
                times[kind].append(step())
            else:
                call = partial(own_pass, tokens=tokens, runs=kinds[kind])
                times[kind] += llm.collective_rpc(call)
    results = []
    for kind, found in times.items():
        ratios = [s / alone for s, alone in zip(found[1:], times["vLLM"][1:], strict=True)]
        results.append({
            "kind": kind, "ms": round(1000 * statistics.median(found[1:]), 1),
            "over_vllm": round(statistics.median(ratios), 3),
            "tokens": length if kind == "vLLM" else sum(map(len, kinds[kind])),
            "rows": 1 if kind == "vLLM" else len(kinds[kind]), "goal": GOALS.get(kind),
        })  # fmt: skip
    return {"machine": machine(), "layers": layers, "rounds": rounds, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description="A pass of our own over vLLM's own step.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "own_pass.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    os.environ |= {**quiet_cpu_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        report = measure(args.layers, args.rounds, Path(directory))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    rows = [("", "tokens", "rows", "median, ms", "over vLLM's step", "goal")]
    for found in report["results"]:
        goal = "-" if found["goal"] is None else str(found["goal"])
        cells = (found["tokens"], found["rows"], found["ms"], found["over_vllm"])
        rows.append((found["kind"], *map(str, cells), goal))
    print(f"\n{args.layers} layers, {args.rounds} rounds")
    print(table(rows))


if __name__ == "__main__":
    main()
