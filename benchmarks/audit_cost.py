# SPDX-License-Identifier: Apache-2.0
"""What the audit costs: throughput and TTFT of hits with it, over without.

    python -m benchmarks.audit_cost [--model small|medium] [--rounds N] [--rate 1/10000] [--json]

Three real servers with a store each, binding the same processors, one with `audit` and two
without; only one is asked at a time, in turn, each first in every third round. What the two without
differ by is the noise. Each round asks for the same prompts, more than HBM has room for: all are
hits in DRAM, and what was drawn is computed. How many were drawn is told: at 1/10000 a short run
may have drawn none, and then shows only that nothing else costs. With a higher --rate the cost of a
draw itself is seen, in hits that would have been served in its time; `ratio_at` says what that
makes of lower rates. A round differs by more than 0.2 % from the next, so that is the way to see so
little: --rate 1/10.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.environment import machine
from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import CASES, Client
from benchmarks.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, TOGETHER = 48, 8
PROMPT_TOKENS = 1025
OUTPUT_TOKENS = 8
LOWER = 1_000, 10_000
ARGUMENTS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "160"]
"""Blocks of 128 tokens on a CPU: 20,480 tokens, and the prompts have 49,200."""
SETTINGS = "dram: 1GiB\nnvme: {{path: {path}, capacity: 2GiB}}\naudit: {audit}\n"


def one_round(server: VllmServer, prompts: list[list[int]]) -> tuple[float, list[float]]:
    """Requests a second, and each one's ms to its first token."""
    clients = [Client(server) for _ in range(TOGETHER)]

    def ask(number: int) -> list[float]:
        mine = prompts[number::TOGETHER]
        return [clients[number].ttft_ms(prompt, OUTPUT_TOKENS) for prompt in mine]

    started = time.perf_counter()
    with ThreadPoolExecutor(TOGETHER) as threads:
        times = [ms for found in threads.map(ask, range(TOGETHER)) for ms in found]
    return len(prompts) / (time.perf_counter() - started), times


def measure(name: str, rounds: int, rate: str) -> dict[str, Any]:
    chance = Random(1)
    prompts = [[chance.randrange(300, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    given = {"audit": f"{{rate: {rate}, tokens: 1000000}}", "off": "off", "off_again": "off"}
    speeds: dict[str, list[float]] = {side: [] for side in given}
    ttfts: dict[str, list[float]] = {side: [] for side in given}
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = str(make_model(work / name, CASES[name].shape))
        arguments = {}
        for side, setting in given.items():
            config = work / f"{side}.yaml"
            config.write_text(SETTINGS.format(path=work / side, audit=setting))
            arguments[side] = [*ARGUMENTS, "--kv-transfer-config", str(config)]
        with (
            VllmServer(model, arguments["audit"], work / "audit.log") as audit,
            VllmServer(model, arguments["off"], work / "off.log") as off,
            VllmServer(model, arguments["off_again"], work / "off_again.log") as off_again,
        ):
            sides = [("audit", audit), ("off", off), ("off_again", off_again)]
            for _, server in sides:  # all is stored, and found once
                for _ in range(2):
                    one_round(server, prompts)
            before = audit.metrics()
            for _ in tqdm(range(rounds), desc=name, unit="round"):
                for side, server in sides:
                    speed, times = one_round(server, prompts)
                    speeds[side].append(speed)
                    ttfts[side] += times
                sides.append(sides.pop(0))
            after = audit.metrics()

    def grown(metric: str, **labels: str) -> float:
        found = [total(of, f"vllm:attnstore_{metric}_total", **labels) for of in (before, after)]
        return found[1] - found[0]

    outcomes = ("agreed", "differed", "not_compared")

    def over_off(side: str) -> list[float]:
        return [a / b for a, b in zip(speeds[side], speeds["off"], strict=True)]

    ratios, noise = over_off("audit"), over_off("off_again")
    drawn = int(grown("recomputations", cause="audit"))
    costs = (1 / statistics.median(ratios) - 1) * rounds * PROMPTS / drawn if drawn else None
    p99 = {side: statistics.quantiles(times, n=100)[98] for side, times in ttfts.items()}
    return {
        "model": name,
        "rate": rate,
        "rounds": rounds,
        "hits": rounds * PROMPTS,
        "drawn": drawn,
        "audits": {outcome: int(grown("audits", outcome=outcome)) for outcome in outcomes},
        "loaded_tokens": int(grown("loaded_tokens")),
        "requests_per_s": {side: round(statistics.median(v), 2) for side, v in speeds.items()},
        "ratio_median": round(statistics.median(ratios), 4),
        "noise_median": round(statistics.median(noise), 4),
        "draw_costs_hits": costs and round(costs, 2),
        "ratio_at": costs and {f"1/{n}": round(1 / (1 + costs / n), 5) for n in LOWER},
        "ratios": [round(r, 3) for r in sorted(ratios)],
        "noise_ratios": [round(r, 3) for r in sorted(noise)],
        "p99_ttft_ms": {side: round(ms, 1) for side, ms in p99.items()},
        "p99_ratio": round(p99["audit"] / p99["off"], 3),
        "p99_noise": round(p99["off_again"] / p99["off"], 3),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the audit costs where all prompts are hits.")
    parser.add_argument("--model", choices=list(CASES), default="small")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rate", default="1/10000")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "audit_cost.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    result = measure(args.model, args.rounds, args.rate)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"\n{result['model']}, rate {result['rate']}: requests a second over off "
        f"{result['ratio_median']}, p99 TTFT {result['p99_ratio']}; two without "
        f"{result['noise_median']}, {result['p99_noise']}; {result['drawn']} of "
        f"{result['hits']} hits were drawn, chunks {result['audits']}; at lower rates "
        f"{result['ratio_at']}"
    )


if __name__ == "__main__":
    main()
