# SPDX-License-Identifier: Apache-2.0
"""What the store adds to the scheduler's thread for a prompt that is in HBM.

    python -m benchmarks.micro.hbm_hit [--tokens 32768 131072] [--rounds 20] [--json]

vLLM's real scheduler, with the store and without it, by turns. A script stands for the model. All
but the last token of each prompt is in vLLM's own prefix cache, and in DRAM too. Timed is the
thread's own processor time, in milliseconds a request, in four parts: the request comes (`add`),
its steps are planned (`schedule`), their results are taken (`update`), and the step that tells the
workers of its end (`after`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import VOCAB

BLOCK, CHUNK = 16, 256
PARTS = ("add", "schedule", "update", "after")
TTFT_MS = {32768: 41.8}
"""Of such a hit on an H200 with vLLM alone (docs/gpu.md)."""
TOKEN = 7
Spent = dict[str, dict[str, list[float]]]
"""Milliseconds of each round, by system and part."""
Execute = Callable[[SchedulerOutput], ModelRunnerOutput]


class Alone:
    """vLLM's scheduler without the store, of the same settings."""

    def __init__(self, engine: ScriptedEngine) -> None:
        config = copy.copy(engine.scheduler.vllm_config)
        config.kv_transfer_config = None
        self.engine = engine
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=engine.scheduler.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[TOKEN] if self._is_whole(name, output) else [] for name in ids],
        )

    def _is_whole(self, name: str, output: SchedulerOutput) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens


def one_request(
    scheduler: Any, execute: Execute, request: Request, clock: Callable[[], int]
) -> dict[str, float]:
    """Milliseconds by part; of `schedule` and `update`, of all its steps."""
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, call: Callable[[], Any]) -> Any:
        began = clock()
        result = call()
        spent[part] += (clock() - began) / 1e6
        return result

    timed("add", lambda: scheduler.add_request(request))
    while scheduler.has_requests():
        is_over = not scheduler.has_unfinished_requests()
        output = timed("after" if is_over else "schedule", scheduler.schedule)
        update = partial(scheduler.update_from_output, output, execute(output))
        timed("after" if is_over else "update", update)
    return spent


def measure(num_tokens: int, rounds: int, directory: Path) -> Spent:
    prompt_blocks = num_tokens // BLOCK
    limits = Limits(
        chunk_tokens=CHUNK,
        model_len=2 * num_tokens,
        batched_tokens=8192,
        dram_slots=2 * num_tokens // CHUNK,
        nvme="64MiB",
    )
    model = make_model(
        directory / "model", replace(TINY, max_position=2 * num_tokens), weights=False
    )
    engine = ScriptedEngine(
        model,
        directory / f"store-{num_tokens}",
        num_blocks=2 * prompt_blocks + 8,
        depth=1,
        seed=0,
        limits=limits,
    )
    alone = Alone(engine)
    random = Random(num_tokens)
    prompt = [random.randrange(1, VOCAB) for _ in range(num_tokens + 1)]
    systems = {
        "store": (engine.scheduler, engine._execute),
        "alone": (alone.scheduler, alone.execute),
    }
    found: Spent = {name: defaultdict(list) for name in systems}
    gc.collect()
    gc.freeze()  # as vLLM's engine does
    for number in range(-2, rounds):
        for name, (scheduler, execute) in systems.items():
            request = engine.make_request(f"{num_tokens} {number}", prompt, 1)
            parts = one_request(scheduler, execute, request, time.thread_time_ns)
            if number >= 0:
                for part, value in parts.items():
                    found[name][part].append(value)
    engine.close()
    return found


def rows_of(num_tokens: int, found: Spent) -> list[list[str]]:
    rows = []
    for part in (*PARTS, "all"):
        with_store, alone = (totals(found[name], part) for name in ("store", "alone"))
        added = median(with_store) - median(alone)
        least = min(with_store) - min(alone)
        rows.append(
            [
                f"{num_tokens:,}",
                part,
                f"{median(alone):.2f}",
                f"{median(with_store):.2f}",
                f"{added:.2f}",
                f"{least:.2f}",
            ]
        )
    return rows


def totals(spent: dict[str, list[float]], part: str) -> list[float]:
    return (
        spent[part]
        if part != "all"
        else [sum(parts) for parts in zip(*spent.values(), strict=True)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[int, Spent] = {}
    with tempfile.TemporaryDirectory() as directory:
        for num_tokens in arguments.tokens:
            found[num_tokens] = measure(num_tokens, arguments.rounds, Path(directory))
    if arguments.json:
        print(json.dumps({"machine": machine(), "ms": found}, indent=2))
        return
    rows = [row for num_tokens, spent in found.items() for row in rows_of(num_tokens, spent)]
    print(table([["tokens", "part", "alone", "with the store", "added", "added, least"], *rows]))
    for num_tokens, ttft in TTFT_MS.items():
        if num_tokens in found:
            total = [median(totals(found[num_tokens][name], "all")) for name in ("store", "alone")]
            share = (total[0] - total[1]) / ttft
            print(
                f"added at {num_tokens:,} tokens: {share:.1%} of {ttft} ms on an H200 (goal: 3 %)"
            )


if __name__ == "__main__":
    main()
