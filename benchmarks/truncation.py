# SPDX-License-Identifier: Apache-2.0
"""A turn whose prompt was cut: TTFT with its kept KV moved, over all of it computed.

    python -m benchmarks.truncation [--history 8000] [--kept 4000] [--rounds N] [--json]

A real `vllm serve` (24 layers) and its completions API, one client. A conversation of `history`
tokens is stored. Then, round after round and by turns, its last `kept` tokens and 32 new ones are
asked for with `truncation: true` and without, with HBM emptied before each; neither is stored.
How many tokens were moved is checked against /metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import MEDIUM, make_model
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import DEV, Client
from benchmarks.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.15
NEW = 32
SALT = "one user"
"""KV is moved among requests of one salt only."""
MOVED = "vllm:attnstore_moved_tokens_total"
UNSTORED = {"attnstore": {"store": False}}
ASKS = {"attnstore": {"store": False, "truncation": True}}


def measure(history: int, kept: int, rounds: int) -> dict[str, Any]:
    random = Random(history)

    def words(count: int) -> list[int]:
        return [random.randrange(300, 2000) for _ in range(count)]

    longest = history + 256
    arguments = [
        "--max-model-len",
        str(longest),
        "--num-gpu-blocks-override",
        str(longest // 128 + 8),
        "--max-num-batched-tokens",
        "2048",
    ]
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / "medium", replace(MEDIUM, max_position=longest))
        config = work / "attnstore.yaml"
        config.write_text(f"dram: 1GiB\nnvme: {{path: {work / 'store'}, capacity: 2GiB}}\n")
        arguments += ["--kv-transfer-config", str(config)]
        with VllmServer(str(model), arguments, work / "log", environment=DEV) as server:
            client = Client(server)
            text = words(history)
            # From the first request that asks for truncation on it is known what may be moved.
            wish = {"attnstore": {"truncation": True}}
            client.ttft_ms(text, kv_transfer_params=wish, cache_salt=SALT)
            times: dict[str, list[float]] = {"moved": [], "computed": []}
            for _ in tqdm(range(rounds), desc="rounds", unit="round"):
                prompt = text[history - kept :] + words(NEW)
                for name, params in (("moved", ASKS), ("computed", UNSTORED)):
                    client.empty_hbm()
                    times[name].append(
                        client.ttft_ms(prompt, kv_transfer_params=params, cache_salt=SALT)
                    )
            client.ttft_ms(words(8))  # one more step, so that the counters are there
            moved = total(server.metrics(), MOVED)
    kept_whole = kept - history % GRAIN_TOKENS
    assert moved == rounds * kept_whole, f"{moved} tokens were moved, expected {kept_whole} a round"
    ratios = [a / b for a, b in zip(times["moved"], times["computed"], strict=True)]
    return {
        "history": history, "kept": kept, "rounds": rounds, "goal": GOAL,
        "ttft_ms": {name: round(statistics.median(ms), 1) for name, ms in times.items()},
        "ratio_median": round(statistics.median(ratios), 4),
        "all_ms": {name: [round(v, 1) for v in ms] for name, ms in times.items()},
        "machine": machine(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of a truncated turn, on a real server.")
    parser.add_argument("--history", type=int, default=8000)
    parser.add_argument("--kept", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "truncation.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    result = measure(args.history, args.kept, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    ttft = result["ttft_ms"]
    row = [
        f"{args.kept} of {args.history}",
        str(ttft["moved"]),
        str(ttft["computed"]),
        str(result["ratio_median"]),
        f"<= {GOAL}",
    ]
    print(table([["tokens kept", "moved ms", "computed ms", "ratio", "goal"], row]))


if __name__ == "__main__":
    main()
