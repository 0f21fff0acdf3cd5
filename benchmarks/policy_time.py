# SPDX-License-Identifier: Apache-2.0
"""What deciding costs a step: a thousand requests wait, hundreds of thousands of chunks are stored.

    python -m benchmarks.policy_time [--waiting 1000] [--tokens 8192] [--chunks 300000]

vLLM's real scheduler, our real scheduler side and a real store on a disk, over the tests' scripted
worker (no model runs). For each request that begins, another comes, so that as many wait in every
step. All of our code that a step runs on the scheduler's thread is timed, with what it waits for
the lock and the interpreter that our own thread, which reads and writes meanwhile, holds. What an
arrival takes comes once a request and is apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.index.keys import SequenceKeys, root_key
from benchmarks.hit_latency import ROOT
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import VOCAB

CHUNK_TOKENS = 256
DRAM_SLOTS = 2048
HOOKS = (
    "get_num_new_matched_tokens",
    "sources",
    "update_state_after_alloc",
    "build_step",
    "on_report",
    "on_failed_requests",
    "request_finished",
    "take_stats",
)
TENANT = bytes(32)
STEP_S = 0.01
"""That an accelerator would take; the disk goes on meanwhile."""


class Clock:
    """Sums up what some of our hooks take."""

    def __init__(self, scheduler: Any, hooks: Sequence[str]) -> None:
        self.seconds = 0.0
        for name in hooks:
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return call

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def run_without_kv(
    row: Any, start: int, num_tokens: int, drafts: list[int]
) -> tuple[None, list[int]]:
    """What is stored here has no bytes that could be checked."""
    if start + num_tokens < len(row.tokens):
        return None, []
    row.tokens.append(0)
    return None, [0]


def fill(engine: ScriptedEngine, prompts: list[list[int]], num_chunks: int, random: Random) -> None:
    """Store the prompts' chunks and others, until there are so many, and let them rest on NVMe."""
    namespace = engine.ours.names.namespace
    assert namespace is not None
    store, root = engine.ours.store, root_key(namespace, None, b"")
    entered, saved = 0, []
    with tqdm(total=num_chunks, desc="chunks", unit="chunk", unit_scale=True) as bar:
        while entered < num_chunks:
            tokens = prompts.pop() if prompts else [random.randrange(VOCAB) for _ in range(8192)]
            keys = SequenceKeys(root, tokens, CHUNK_TOKENS)
            for number in range(len(tokens) // CHUNK_TOKENS):
                chunk = store.begin_save(keys.name(number, TENANT))
                if chunk is not None:
                    saved.append(chunk)
            store.finish_saves(saved)
            entered += len(saved)
            bar.update(len(saved))
            saved.clear()
            while len(store.residency.nvme.waiting) > DRAM_SLOTS // 2:
                time.sleep(0.001)
    while not store.is_idle():
        time.sleep(0.01)


def measure(waiting: int, num_tokens: int, num_chunks: int, steps: int) -> dict[str, Any]:
    random = Random(6)
    prompts = [[random.randrange(VOCAB) for _ in range(num_tokens)] for _ in range(waiting)]
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        limits = Limits(
            chunk_tokens=CHUNK_TOKENS,
            model_len=num_tokens + 512,
            batched_tokens=2048,
            sequences=8,
            dram_slots=DRAM_SLOTS,
            nvme=f"{num_chunks * 9}KiB",
            layers=1,
        )
        shape = replace(SMALL, max_position=num_tokens + 512)
        engine = ScriptedEngine(
            make_model(work / "model", shape),
            work / "store",
            depth=1,
            seed=1,
            limits=limits,
            num_blocks=8 * (num_tokens + 512) // 16 + 64,
            compute_if_sooner=True,
        )
        engine.worker._run = run_without_kv  # type: ignore[method-assign, assignment]
        engine.worker._compute = lambda *_, **__: None  # type: ignore[method-assign]
        fill(engine, list(prompts), num_chunks, random)
        resident = len(engine.ours.store.residency.index)
        clock = Clock(engine.ours, HOOKS)
        arrival_clock = Clock(engine.ours, ["on_new_request"])
        arrivals, seconds, fewest, begun = list[float](), list[float](), waiting, 0
        for step in tqdm(range(steps), desc="steps", unit="step"):
            while (missing := waiting - _num_waiting(engine)) > 0:
                begun += missing if step else 0
                for _ in range(missing):  # the conversations come back in turns
                    number = len(arrivals)
                    engine.add(str(number), [*prompts[number % waiting], 1], 16)
                    arrivals.append(arrival_clock.take())
            clock.take()
            engine.step()
            time.sleep(STEP_S)
            seconds.append(clock.take())
            fewest = min(fewest, _num_waiting(engine))
        stats = engine.ours.store.figures().counts
        for number in range(len(arrivals)):
            engine.abort(str(number))
        engine.drain()
        engine.close()
    seconds.sort()
    return {
        "waiting": waiting,
        "fewest_waiting": fewest,
        "begun": begun,
        "prompt_tokens": num_tokens,
        "resident_chunks": resident,
        "steps": len(seconds),
        "policy_ms": {
            "median": round(1000 * statistics.median(seconds), 3),
            "mean": round(1000 * statistics.fmean(seconds), 3),
            "p99": round(1000 * seconds[int(0.99 * len(seconds))], 3),
            "max": round(1000 * seconds[-1], 3),
            "share_of_steps_below_1_ms": round(sum(s < 0.001 for s in seconds) / len(seconds), 4),
        },
        "arrival_ms": round(1000 * statistics.median(arrivals), 3),
        "evicted_dram": stats.get("evicted_dram", 0),
    }


def _num_waiting(engine: ScriptedEngine) -> int:
    """Requests that have not begun, those that wait for their KV too."""
    return len(engine.scheduler.requests) - len(engine.scheduler.running)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that deciding takes of a step.")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=300_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "policy_time.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    result = measure(args.waiting, args.tokens, args.chunks, args.steps)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    ms = result["policy_ms"]
    print(
        f"\n{result['waiting']} waiting requests of {result['prompt_tokens']} tokens, "
        f"{result['resident_chunks']:,} chunks stored: a step spends {ms['median']} ms with us "
        f"(mean {ms['mean']}, p99 {ms['p99']}, max {ms['max']}, below 1 ms in "
        f"{ms['share_of_steps_below_1_ms']:.1%}) in {result['steps']} steps, in which "
        f"{result['begun']} requests began; a request's arrival takes {result['arrival_ms']} ms"
    )


if __name__ == "__main__":
    main()
