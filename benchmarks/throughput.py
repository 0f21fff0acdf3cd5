# SPDX-License-Identifier: Apache-2.0
"""Throughput with the store and nothing reused, over throughput without it.

    python -m benchmarks.throughput [--model small|medium] [--rounds N] [--json]

Two real servers at a time, with the store and without, binding the same processors; only one is
asked at a time, in turn, each first in every other round, so that both see the same noise. Every
prompt is new, so the store hashes, saves and writes back everything and saves nothing.
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

from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import CASES, Client
from benchmarks.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = 16
"""They come together: clients that come one after the other make batches of chance, which differ
by more between two rounds than the store costs."""
PROMPT_TOKENS = {"small": 1000, "medium": 500}
OUTPUT_TOKENS = 32
ARGUMENTS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "160"]


def one_round(server: VllmServer, random: Random, prompt_tokens: int) -> float:
    """Tokens a second of REQUESTS new requests that come together."""
    prompts = [[random.randrange(300, 2000) for _ in range(prompt_tokens)] for _ in range(REQUESTS)]
    started = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as clients:
        list(clients.map(lambda p: Client(server).ttft_ms(p, OUTPUT_TOKENS), prompts))
    seconds = time.perf_counter() - started
    return REQUESTS * (prompt_tokens + OUTPUT_TOKENS) / seconds


def measure(name: str, rounds: int) -> dict[str, Any]:
    random = Random(1)
    tokens = PROMPT_TOKENS[name]
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = str(make_model(work / name, CASES[name].shape))
        config = work / "attnstore.yaml"
        config.write_text(f"dram: 512MiB\nnvme: {{path: {work / 'store'}, capacity: 2GiB}}\n")
        store_arguments = [*ARGUMENTS, "--kv-transfer-config", str(config)]
        with (
            VllmServer(model, store_arguments, work / "store.log") as store,
            VllmServer(model, ARGUMENTS, work / "plain.log") as plain,
        ):
            for server in (store, plain):
                one_round(server, random, tokens)  # warm up
            speeds: dict[str, list[float]] = {"store": [], "plain": []}
            sides = [("store", store), ("plain", plain)]
            for _ in tqdm(range(rounds), desc=name, unit="round"):
                for side, server in sides:
                    speeds[side].append(one_round(server, random, tokens))
                sides.reverse()
            metrics = store.metrics()
        saved = total(metrics, "vllm:attnstore_chunks_total", event="saved")
        loaded = total(metrics, "vllm:attnstore_loaded_tokens_total")
    assert saved > 0 and loaded == 0, "the load was not what it should be"
    ratios = [a / b for a, b in zip(speeds["store"], speeds["plain"], strict=True)]
    return {
        "model": name,
        "rounds": rounds,
        "requests_a_round": REQUESTS,
        "prompt_tokens": tokens,
        "output_tokens": OUTPUT_TOKENS,
        "tokens_per_s": {k: round(statistics.median(v), 1) for k, v in speeds.items()},
        "ratio_median": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in sorted(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with nothing reused.")
    parser.add_argument("--model", choices=list(CASES), default="small")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "throughput.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a line")
    args = parser.parse_args()
    result = measure(args.model, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    speeds = result["tokens_per_s"]
    print(
        f"\n{result['model']}: {speeds['store']} tokens/s with the store, {speeds['plain']} "
        f"without; ratio of paired rounds, median {result['ratio_median']} "
        f"(of {result['ratios']})"
    )


if __name__ == "__main__":
    main()
