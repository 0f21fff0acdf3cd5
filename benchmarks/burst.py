# SPDX-License-Identifier: Apache-2.0
"""A burst of conversations that come back at once, with look-ahead and without it.

    python -m benchmarks.burst [--conversations 40] [--rounds 3]

Two real `vllm serve` side by side, one with `look_ahead: false`; histories lie on NVMe, DRAM has
room for an eighth of them. Each round asks a few conversations' next turns of one server one at a
time, when no queue tells anything, then of the other; when all these are over, rounds ask all next
turns at once: what a burst leaves in DRAM is not the same on both sides. HBM is emptied before each
turn of a server. Both bind the same processors, and the order of the two servers changes from
round to round. Then both are started again in the other order: the one that starts first is the
slower one by some per cent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import CASES, DEV, ROOT, Client
from benchmarks.server import NO_AUDIT, VllmServer

HISTORY_TOKENS = 1920
NEW_TOKENS = 33
ANSWER_TOKENS = 8
SINGLES = 8
PAUSE_S = 2.0
"""After each turn of a server, which writes what its burst has left: not into the other's time."""
WANTED = "vllm:attnstore_wanted_tokens_total"
ARGUMENTS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "48", "--max-num-seqs", "2"]


class Side:
    """What was measured with look-ahead, or without it."""

    def __init__(self) -> None:
        self.burst_ms: list[list[float]] = []
        self.single_ms: list[list[float]] = []
        self.in_dram: list[float] = []


class Turn:
    """One server, which is asked the next turns of conversations that it has stored."""

    def __init__(self, side: Side, server: VllmServer, histories: list[list[int]]) -> None:
        self.side = side
        self.server = server
        self.histories = histories
        for history in tqdm(histories, desc="histories", unit="conversation", leave=False):
            Client(server).ttft_ms(history, 1)

    def burst(self, random: Random) -> None:
        """All next turns at once."""
        Client(self.server).empty_hbm()
        prompts = [history + _tokens(random, NEW_TOKENS) for history in self.histories]
        before = self.server.metrics()
        with ThreadPoolExecutor(len(prompts)) as clients:
            times = clients.map(lambda p: Client(self.server).ttft_ms(p, ANSWER_TOKENS), prompts)
            self.side.burst_ms.append(list(times))
        after = self.server.metrics()
        dram, nvme = (
            total(after, WANTED, tier=tier) - total(before, WANTED, tier=tier)
            for tier in ("dram", "nvme")
        )
        self.side.in_dram.append(dram / (dram + nvme))
        time.sleep(PAUSE_S)

    def singles(self, random: Random) -> None:
        """A few next turns, one at a time."""
        client = Client(self.server)
        client.empty_hbm()
        chosen = random.sample(self.histories, SINGLES)
        self.side.single_ms.append(
            [client.ttft_ms(h + _tokens(random, NEW_TOKENS), ANSWER_TOKENS) for h in chosen]
        )
        time.sleep(PAUSE_S)


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(300, 2000) for _ in range(count)]


def measure(num_conversations: int, rounds: int) -> dict[str, Any]:
    random = Random(4)
    histories = [_tokens(random, HISTORY_TOKENS) for _ in range(num_conversations)]
    sides = {"with": Side(), "without": Side()}
    with (
        tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as work,
        tqdm(total=4 * (rounds + 1), desc="turns", unit="round") as bar,
    ):
        model = str(make_model(Path(work) / "small", SMALL))
        for names in (("with", "without"), ("without", "with")):
            with ExitStack() as servers:
                turns = []
                for name in names:
                    server = servers.enter_context(_server(Path(work), model, name, histories))
                    turns.append(Turn(sides[name], server, histories))
                for ask in (Turn.singles, Turn.burst):
                    for number in range(rounds + 1):
                        for turn in turns:
                            ask(turn, Random(number))
                        turns.reverse()
                        bar.update()
            for side in sides.values():  # the first round of each start taught the cost model
                first = -1 - rounds
                del side.burst_ms[first], side.single_ms[first], side.in_dram[first]
    return {
        "conversations": num_conversations,
        "history_tokens": HISTORY_TOKENS,
        "rounds": 2 * rounds,
        **{name: _summary(side) for name, side in sides.items()},
        "burst_median_ratio": _ratio(sides["with"].burst_ms, sides["without"].burst_ms),
        "single_median_ratio": _ratio(sides["with"].single_ms, sides["without"].single_ms),
    }


def _server(work: Path, model: str, name: str, histories: list[list[int]]) -> VllmServer:
    kv_bytes = len(histories) * HISTORY_TOKENS * CASES["small"].token_bytes
    config = work / f"{name}.yaml"
    config.write_text(
        f"dram: {kv_bytes // 8}\nnvme: {{path: {work / name}, capacity: 4GiB}}\n"
        f"look_ahead: {'true' if name == 'with' else 'false'}\n{NO_AUDIT}"
    )
    arguments = [*ARGUMENTS, "--kv-transfer-config", str(config)]
    return VllmServer(model, arguments, work / f"{name}.log", environment=DEV)


def _summary(side: Side) -> dict[str, Any]:
    burst = sorted(ms for times in side.burst_ms for ms in times)
    single = sorted(ms for times in side.single_ms for ms in times)
    return {
        "in_dram_when_offered": round(statistics.median(side.in_dram), 4),
        "burst_ttft_ms": {"median": round(statistics.median(burst), 1),
                          "p95": round(burst[int(0.95 * len(burst))], 1)},
        "single_ttft_ms": {"median": round(statistics.median(single), 1),
                           "p95": round(single[int(0.95 * len(single))], 1)},
    }  # fmt: skip


def _ratio(ours: list[list[float]], others: list[list[float]]) -> float:
    """The median over rounds of the ratio of medians."""
    pairs = zip(ours, others, strict=True)
    return round(
        statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs), 3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Look-ahead on a real server, on and off.")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="of each start")
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
    print(
        f"with over without, median of rounds: {result['burst_median_ratio']} in the burst, "
        f"{result['single_median_ratio']} one at a time"
    )


if __name__ == "__main__":
    main()
