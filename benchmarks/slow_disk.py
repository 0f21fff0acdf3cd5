# SPDX-License-Identifier: Apache-2.0
"""TTFT of turn 2 and later with a slow NVMe, over that with DRAM alone.

    VLLM_CPU_OMP_THREADS_BIND=1 python -m benchmarks.slow_disk [--rates 0.2,1] [--rounds N]

Real servers side by side, one for each bandwidth (GB/s; benchmarks/throttled.py slows the disk
down) and one without NVMe, all binding the same processors. A round holds the same new
conversations with one server after another, in an order that turns from round to round, so that all
see the same noise. DRAM has room for a quarter of a round's KV and HBM for less. Text is random
tokens: what stands for an answer was drawn before, and its KV is computed with the next turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import CASES, ROOT, Client
from benchmarks.server import VllmServer

RATE = "ATTNSTORE_BENCH_NVME"
"""Tells a server the bytes a second of its disk."""
NO_NVME = 0.0
CONVERSATIONS, TURNS = 8, 4
CLIENTS = 3
"""More than run at a time (ARGUMENTS): so there is a queue now and then."""
TURN_TOKENS = (300, 700)
ANSWER_TOKENS = 8
DRAM_SHARE = 0.25
PAUSE_S = 1.0
"""After a server's part of a round, for what it still writes."""
LOADED = "vllm:attnstore_loaded_tokens_total"
ARGUMENTS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "48", "--max-num-seqs", "2"]
Conversation = list[list[int]]
"""The new tokens of each turn."""


def draw(random: Random) -> list[Conversation]:
    return [
        [
            [random.randrange(300, 2000) for _ in range(random.randint(*TURN_TOKENS))]
            for _ in range(TURNS)
        ]
        for _ in range(CONVERSATIONS)
    ]


def hold(server: VllmServer, conversations: Sequence[Conversation]) -> list[float]:
    """TTFT in ms of all turns but the first. Each client takes the next turn of its conversations
    in rotation, so that between two turns of one the others have theirs."""

    def client(number: int) -> list[float]:
        times = []
        http = Client(server)
        for turn in range(TURNS):
            for conversation in conversations[number::CLIENTS]:
                prompt = [token for tokens in conversation[: turn + 1] for token in tokens]
                ms = http.ttft_ms(prompt, ANSWER_TOKENS)
                times += [ms] if turn else []
        return times

    with ThreadPoolExecutor(CLIENTS) as clients:
        return [ms for times in clients.map(client, range(CLIENTS)) for ms in times]


def start(work: Path, model: str, rate: float) -> VllmServer:
    round_bytes = CONVERSATIONS * TURNS * sum(TURN_TOKENS) // 2 * CASES["small"].token_bytes
    name = f"{rate:g}"
    transfer = {
        "kv_connector": "AttnStoreConnector",
        "kv_connector_module_path": "benchmarks.throttled",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "dram": int(DRAM_SHARE * round_bytes),
            "nvme": {"path": str(work / name), "capacity": "2GiB"},
        },
    }
    return VllmServer(
        model,
        [*ARGUMENTS, "--kv-transfer-config", json.dumps(transfer)],
        work / f"{name}.log",
        environment={RATE: str(rate * 1e9), "PYTHONPATH": str(ROOT)},
    )


def measure(rates: Sequence[float], rounds: int, seed: int) -> dict[str, Any]:
    """`rates` in the order in which their servers start."""
    times: dict[float, list[list[float]]] = {rate: [] for rate in rates}
    loaded: dict[float, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory,
        ExitStack() as servers,
    ):
        work = Path(directory)
        model = str(make_model(work / "small", SMALL))
        sides = [(rate, servers.enter_context(start(work, model, rate))) for rate in rates]
        for number in tqdm(range(rounds + 1), desc="rounds", unit="round"):
            conversations = draw(Random(1000 * seed + number))
            for rate, server in sides:
                times[rate].append(hold(server, conversations))
                time.sleep(PAUSE_S)
            sides = [*sides[1:], sides[0]]
        for rate, server in sides:
            metrics = server.metrics()
            loaded[rate] = {tier: total(metrics, LOADED, tier=tier) for tier in ("dram", "nvme")}
    assert loaded[NO_NVME]["nvme"] == 0, "there was no NVMe"
    # The first round taught the cost model.
    medians = {rate: [statistics.median(ms) for ms in found[1:]] for rate, found in times.items()}
    none = medians[NO_NVME]
    return {
        f"{rate:g}": {
            "ttft_ms": round(statistics.median([ms for r in times[rate][1:] for ms in r]), 2),
            "rounds_ms": [round(ms, 2) for ms in medians[rate]],
            "over_none": [round(a / b, 4) for a, b in zip(medians[rate], none, strict=True)],
            "loaded_tokens": loaded[rate],
        }
        for rate in sorted(rates)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A slow NVMe beside none, real servers.")
    parser.add_argument("--rates", default="0.2,1", help="GB/s")
    parser.add_argument("--rounds", type=int, default=4, help="of each of the two starts")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "slow_disk.json")
    args = parser.parse_args()
    rates = [NO_NVME, *map(float, args.rates.split(","))]
    # Who starts first is the slower one by some per cent.
    starts = [
        measure(order, args.rounds, seed) for seed, order in enumerate((rates, rates[::-1]), 1)
    ]
    report: dict[str, Any] = {"rounds": 2 * args.rounds, "starts": starts, "over_none": {}}
    for name in starts[0]:
        ratios = [ratio for found in starts for ratio in found[name]["over_none"]]
        report["over_none"][name] = round(statistics.median(ratios), 4)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\nTTFT of turn 2 and later over that without NVMe, median of rounds:")
    for name, ratio in report["over_none"].items():
        print(f"{name:>6} GB/s {ratio:.3f}")


if __name__ == "__main__":
    main()
