# SPDX-License-Identifier: Apache-2.0
"""What numbers that a client chooses cost the scheduler's thread: a long prompt, n, many lanes.

    python -m benchmarks.micro.client_numbers [--rounds 15] [--json]

The real scheduler side over a real store, called as vLLM calls it, without a model. Times are the
thread's own, so other work on the machine counts little. Each row is the median over rounds:

    prompt   of 131,072 tokens that nothing is stored of: it comes, and vLLM asks for it
    child    one of n = 500 of a prompt of 2,000 tokens: it comes. The median of its round. It is
             looked up when vLLM asks, or at the step's end within `step_budget`
    victim   one slot of DRAM among 4,000 lanes of kinds and priorities; of 1,000 decisions, the
             99th percentile. Time passes between them, and each freed slot is filled again
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np

from attnstore_lab.bench.summary import table
from attnstore_vllm.policy.eviction.departures import Departures, departures
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import NUM_KINDS, ReturnEstimator
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.scheduler.scheduler import Scheduler
from benchmarks.report import machine
from benchmarks.scheduler_time import make_request, make_scheduler, report_of, step_of, timed

PROMPT_TOKENS = 131_072
CHILD_TOKENS, CHILDREN = 2_000, 500
LANES, SLOTS_A_LANE, DECISIONS = 4_000, 4, 1_000
PAUSES_S = (0.0005, 60.0)
"""Between two decisions: the least and the most, drawn evenly by their logarithm."""
BLOCK = 16
GOALS_MS = {"prompt": 2.0, "child": 0.02, "victim": 0.1}


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of one number, over all rounds."""

    name: str
    rounds_ms: list[float]
    goal_ms: float

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def verdict(self) -> str:
        return "met" if self.ms <= self.goal_ms else "MISSED"


def prompt_ms(scheduler: Scheduler, name: int, tokens: list[int]) -> float:
    """A new prompt comes, and vLLM asks how much of it is stored."""
    request = make_request(name, tokens)

    def come() -> None:
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)

    ms, _ = timed(come, time.thread_time)
    scheduler.request_finished(request, ([],))
    turn(scheduler)
    return ms


def child_ms(scheduler: Scheduler, name: int, tokens: list[int], children: int) -> float:
    """The children of one prompt come in a row, as vLLM adds them; their median."""
    requests = [make_request(name + number, tokens) for number in range(children)]
    times = [timed(partial(scheduler.on_new_request, r), time.thread_time)[0] for r in requests]
    for request in requests:
        scheduler.request_finished(request, ([],))
    turn(scheduler)
    return statistics.median(times[1:])  # the first is the prompt itself


def turn(scheduler: Scheduler) -> None:
    """A step of none, so that those who have ended are forgotten."""
    scheduler.on_report(report_of(scheduler.build_step(step_of({}))))


def full_tier(lanes: int) -> Departures:
    """A tier whose every slot is filled, with runs of so many kinds and priorities."""
    order = departures("attnstore", lanes * SLOTS_A_LANE, ReturnEstimator())
    priorities = [each for each in Priority if each > Priority.ENDED]
    cells = [(kind, priority) for priority in priorities for kind in range(NUM_KINDS)]
    Random(1).shuffle(cells)
    for slot in range(lanes * SLOTS_A_LANE):
        kind, priority = cells[slot % lanes]
        order.add(slot, Run(0, kind, slot * 0.01, False, priority))
    return order


def victims_ms(seed: int, lanes: int, decisions: int) -> list[float]:
    """What each decision takes. A freed slot is filled by a run of the kind that it was of."""
    order, random, now = full_tier(lanes), Random(seed), 1000.0
    times = []
    low, high = np.log(PAUSES_S)
    for _ in range(decisions):
        now += float(np.exp(random.uniform(low, high)))
        ms, slot = timed(partial(order.victim, now, lambda _: True), time.thread_time)
        times.append(ms)
        was = order.run_of(slot)
        assert was is not None
        order.remove(slot)
        order.add(slot, Run(0, was.kind, now, False, was.priority))
    return times


def measure(
    rounds: int,
    prompt_tokens: int = PROMPT_TOKENS,
    children: int = CHILDREN,
    lanes: int = LANES,
    decisions: int = DECISIONS,
) -> Iterator[Row]:
    random = Random(0)

    def drawn(count: int) -> list[int]:
        return [random.randrange(50_000) for _ in range(count)]

    prompts, of_n, p99s = [], [], []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        scheduler = make_scheduler(Path(directory) / "store", BLOCK, num_slots=64)
        pool = SimpleNamespace(
            cached_block_hash_to_block={}, hash_block_size=BLOCK, get_num_free_blocks=lambda: 0
        )
        scheduler.bind_kv_cache_manager(
            SimpleNamespace(get_block_ids=lambda _: ([],), block_pool=pool)
        )
        for number in range(rounds + 1):
            name = number * (children + 1)
            prompts.append(prompt_ms(scheduler, name, drawn(prompt_tokens)))
            of_n.append(child_ms(scheduler, name + 1, drawn(CHILD_TOKENS), children))
            p99s.append(float(np.percentile(victims_ms(number, lanes, decisions), 99)))
        scheduler.close()
    for (row, goal_ms), found in zip(GOALS_MS.items(), (prompts, of_n, p99s), strict=True):
        yield Row(row, found[1:], goal_ms)  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    rows = list(measure(args.rounds))
    if args.json:
        found = [{**asdict(row), "ms": row.ms, "verdict": row.verdict} for row in rows]
        print(json.dumps({"machine": machine(), "rows": found}))
        return
    shown = [
        (row.name, *(f"{ms:.4f}" for ms in (row.ms, min(row.rounds_ms), max(row.rounds_ms))),
         f"{row.goal_ms:g}", row.verdict)
        for row in rows
    ]  # fmt: skip
    print(table([("", "median ms", "least", "most", "goal", "verdict"), *shown]))


if __name__ == "__main__":
    main()
