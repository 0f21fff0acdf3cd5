# SPDX-License-Identifier: Apache-2.0
"""A burst of conversations that come back at once, with look-ahead and without it.

    python -m benchmarks.burst [--conversations 40] [--rounds 6]

Two real `vllm serve` side by side, one with `look_ahead: false`; histories lie on NVMe, DRAM has
room for an eighth of them. Each round asks all conversations' next turns of one server at once,
then of the other; then a few of each one at a time, when no queue tells anything. Both bind the
same processors, and the order of the two servers changes from round to round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_vllm.testing.tiny_model import SMALL, make_model
from benchmarks.hit_latency import CASES, DEV, ROOT, Client
from benchmarks.server import VllmServer, total

HISTORY_TOKENS = 1920
NEW_TOKENS = 33
ANSWER_TOKENS = 8
SINGLES = 8
WANTED = "vllm:attnstore_wanted_tokens_total"
ARGUMENTS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "48", "--max-num-seqs", "2"]


class Side:
    """One server and what was measured on it."""

    def __init__(self, server: VllmServer, histories: list[list[int]]) -> None:
        self.server = server
        self.histories = histories
        self.burst_ms: list[list[float]] = []
        self.single_ms: list[list[float]] = []
        self.in_dram: list[float] = []
        for history in tqdm(histories, desc="histories", unit="conversation"):
            Client(server).ttft_ms(history, 1)

    def burst(self, random: Random) -> None:
        """All next turns at once."""
        Client(self.server).empty_hbm()
        prompts = [history + _tokens(random, NEW_TOKENS) for history in self.histories]
        before = self.server.metrics()
        with ThreadPoolExecutor(len(prompts)) as clients:
            times = clients.map(lambda p: Client(self.server).ttft_ms(p, ANSWER_TOKENS), prompts)
            self.burst_ms.append(list(times))
        after = self.server.metrics()
        dram, nvme = (
            total(after, WANTED, tier=tier) - total(before, WANTED, tier=tier)
            for tier in ("dram", "nvme")
        )
        self.in_dram.append(dram / (dram + nvme))

    def singles(self, random: Random) -> None:
        """A few next turns, one at a time."""
        client = Client(self.server)
        chosen = random.sample(self.histories, SINGLES)
        self.single_ms.append(
            [client.ttft_ms(h + _tokens(random, NEW_TOKENS), ANSWER_TOKENS) for h in chosen]
        )


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(300, 2000) for _ in range(count)]


def measure(num_conversations: int, rounds: int) -> dict[str, Any]:
    random = Random(4)
    histories = [_tokens(random, HISTORY_TOKENS) for _ in range(num_conversations)]
    kv_bytes = num_conversations * HISTORY_TOKENS * CASES["small"].token_bytes
    with ExitStack() as stack:
        work = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp")
        ))  # fmt: skip
        model = str(make_model(work / "small", SMALL))
        sides = {}
        for name, looks_ahead in (("with", "true"), ("without", "false")):
            config = work / f"{name}.yaml"
            config.write_text(
                f"dram: {kv_bytes // 8}\nnvme: {{path: {work / name}, capacity: 4GiB}}\n"
                f"look_ahead: {looks_ahead}\nload_deadline_ms: 10000\n"
            )
            arguments = [*ARGUMENTS, "--kv-transfer-config", str(config)]
            server = VllmServer(model, arguments, work / f"{name}.log", environment=DEV)
            sides[name] = Side(stack.enter_context(server), histories)
        order = list(sides.values())
        for number in tqdm(range(rounds + 1), desc="bursts", unit="round"):
            for side in order:
                side.burst(Random(number))
            for side in order:
                side.singles(Random(number))
            order.reverse()
    for side in sides.values():  # the first round taught the cost model
        del side.burst_ms[0], side.single_ms[0], side.in_dram[0]
    return {
        "conversations": num_conversations,
        "history_tokens": HISTORY_TOKENS,
        "rounds": rounds,
        **{name: _summary(side) for name, side in sides.items()},
        "burst_median_ratio": _ratio(sides["with"].burst_ms, sides["without"].burst_ms),
        "single_median_ratio": _ratio(sides["with"].single_ms, sides["without"].single_ms),
    }


def _summary(side: Side) -> dict[str, Any]:
    burst = sorted(ms for times in side.burst_ms for ms in times)
    single = sorted(ms for times in side.single_ms for ms in times)
    return {
        "in_dram_when_offered": round(statistics.median(side.in_dram), 4),
        "burst_ttft_ms": {"median": round(statistics.median(burst), 1),
                          "p95": round(burst[int(0.95 * len(burst))], 1)},
        "single_ttft_ms": {"median": round(statistics.median(single), 1)},
    }  # fmt: skip


def _ratio(ours: list[list[float]], others: list[list[float]]) -> float:
    """The median over rounds of the ratio of medians."""
    pairs = zip(ours, others, strict=True)
    return round(statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs),
                 3)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Look-ahead on a real server, on and off.")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "burst.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    result = measure(args.conversations, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    print(f"\n{args.conversations} conversations of {HISTORY_TOKENS} tokens come back at once")
    print(f"{'look-ahead':>12} {'in DRAM':>9} {'TTFT median':>12} {'p95':>8} {'one at a time':>14}")
    for name in ("with", "without"):
        side = result[name]
        print(
            f"{name:>12} {side['in_dram_when_offered']:>9.1%} "
            f"{side['burst_ttft_ms']['median']:>12} {side['burst_ttft_ms']['p95']:>8} "
            f"{side['single_ttft_ms']['median']:>14}"
        )
    print(f"with over without, median of rounds: {result['burst_median_ratio']} in the burst, "
          f"{result['single_median_ratio']} one at a time")  # fmt: skip


if __name__ == "__main__":
    main()
