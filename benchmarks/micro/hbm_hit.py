# SPDX-License-Identifier: Apache-2.0
"""What the store adds to the scheduler's thread for a prompt that is in HBM.

    python -m benchmarks.micro.hbm_hit [--tokens 32768 131072] [--rounds 20] [--json]

vLLM's real scheduler, with the store and without it, by turns over a scripted model. All but the
last token of each prompt is in vLLM's own prefix cache, and in DRAM too. Timed is the thread's own
processor time, in milliseconds a request, in four parts: the request comes (`add`), its step is
planned (`schedule`), its result is taken (`update`), and the step behind its end (`after`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
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
from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import VOCAB

BLOCK, CHUNK = 16, 256
PARTS = ("add", "schedule", "update", "after")
TTFT_MS = {32768: 41.8}
"""Of such a hit on an H200 with vLLM alone (docs/gpu.md)."""
TOKEN = 7
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
        result = execute(output)
        timed(
            "after" if is_over else "update",
            lambda o=output, r=result: scheduler.update_from_output(o, r),
        )
    return spent


def measure(num_tokens: int, rounds: int, directory: Path) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by system and part, a list of rounds."""
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
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in systems}
    gc.collect()
    for number in range(-2, rounds):
        for name, (scheduler, execute) in systems.items():
            request = engine.make_request(f"{num_tokens} {number}", prompt, 1)
            parts = one_request(scheduler, execute, request, time.thread_time_ns)
            if number >= 0:
                for part, value in parts.items():
                    found[name][part].append(value)
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for num_tokens in arguments.tokens:
            found = measure(num_tokens, arguments.rounds, Path(directory))
            results += [
                {
                    "tokens": num_tokens,
                    "system": name,
                    "part": part,
                    "ms": median(values),
                    "least": min(values),
                }
                for name, parts in found.items()
                for part, values in parts.items()
            ]
    if arguments.json:
        print(json.dumps({"machine": machine(), "results": results}, indent=2))
        return
    for row in results:
        print(row)


if __name__ == "__main__":
    main()
