# SPDX-License-Identifier: Apache-2.0
"""Throughput while everything is saved and nothing is reused, over an engine without a connector.

Two engines with the same processors take turns *step by step*, with the same new prompts, so that
both compute the same batches; who is first changes with each step. A shared machine is half as fast
for a second and then is not: rounds of a few seconds by turns have ratios from 0.7 to 1.4
(benchmarks/throughput.py, two servers), while neighbouring steps mostly see the same machine.
Mostly: so of each of a round's steps the cost is the median, over the rounds, of what it took
longer with the store, and `ratio` is made of these costs; `ratio_of_all` of all seconds as they
were.

What the store does beside the model (checksums, writing to NVMe) must not fall into the other's
turn. So each waits after its step until its store has nothing left to do, and what processor time
that took, beyond what it took without a store, is added to the step: as if the model had waited
for all of it. Behind a server it has another processor if one is free, so this is an upper bound.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from attnstore_vllm.testing.tiny_model import SMALL
from benchmarks.overlap_parts.common import Host, Line, Settings, model_threads, say, spread
from tests.vllm.engine import Engine, EngineSpec
from tests.vllm.prompts import random_tokens

GOAL = 0.98
TOGETHER = 16
PROMPT_TOKENS = 1000
ANSWER_TOKENS = 32
BATCHED_TOKENS = 2048
ROUNDS = 24
CALM_S = 0.02
"""After a step: OpenMP's threads go to sleep."""
SIDES = ("plain", "store")


def begin(engine: Engine, number: int, prompt_tokens: int) -> list[str]:
    """Submit a round's requests. Returns their numbers."""
    prompts = [random_tokens(("throughput", number, i), prompt_tokens) for i in range(TOGETHER)]
    return [engine.submit(p, max_tokens=ANSWER_TOKENS, logprobs=None) for p in prompts]


def step(engine: Engine) -> tuple[float, float]:
    """One step: seconds, and processor seconds from its end until all it began is over."""
    began = time.perf_counter()
    engine.llm.llm_engine.step()  # without what Engine.step() checks
    ended, busy = time.perf_counter(), time.process_time()
    time.sleep(CALM_S)
    if engine.spec.store is not None:
        engine.wait_for(engine.store.is_idle)
    return ended - began, time.process_time() - busy


def is_over(engine: Engine) -> bool:
    return not engine.llm.llm_engine.has_unfinished_requests()


def saved_bytes(engine: Engine) -> int:
    engine.drain()
    assert engine.loaded() == {"dram": 0, "nvme": 0}
    return int(engine.metric("bytes", "dram_to_nvme"))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step on both sides."""

    plain: float
    store: float
    after: float
    """Processor seconds of the store when its step was over, beyond those of the other side."""

    @property
    def cost(self) -> float:
        return self.store + self.after - self.plain


def one_round(hosts: dict[str, Host], number: int, prompt_tokens: int) -> list[StepTimes]:
    """All steps of a round."""
    for host in hosts.values():
        host.call(begin, number, prompt_tokens)
    order, found = list(SIDES), list[StepTimes]()
    while not hosts["plain"].call(is_over):
        times = {side: hosts[side].call(step) for side in order}
        (plain, idle), (store, busy) = times["plain"], times["store"]
        found.append(StepTimes(plain, store, busy - idle))
        order.reverse()
    assert hosts["store"].call(is_over), "both were to take as many steps"
    return found


def summary(rounds: Sequence[Sequence[StepTimes]]) -> dict[str, Any]:
    """The figures that do not depend on what was asked. Rounds have the same steps."""
    plain = [statistics.median(one.plain for one in steps) for steps in zip(*rounds, strict=True)]
    costs = [statistics.median(one.cost for one in steps) for steps in zip(*rounds, strict=True)]
    whole = {
        name: sum(getattr(one, name) for steps in rounds for one in steps)
        for name in ("plain", "store", "after")
    }
    all_plain = whole["plain"]
    return {
        "rounds": len(rounds),
        "steps_a_round": len(plain),
        "step_ms": {"plain": [round(1000 * s, 2) for s in plain],
                    "cost": [round(1000 * s, 2) for s in costs]},
        "seconds": {name: round(value, 3) for name, value in whole.items()},
        "ratio": round(sum(plain) / (sum(plain) + sum(costs)), 3),
        "ratio_of_all": round(all_plain / (whole["store"] + whole["after"]), 3),
        "ratio_of_rounds": spread([
            sum(one.plain for one in steps) / sum(one.plain + one.cost for one in steps)
            for steps in rounds
        ]),
    }  # fmt: skip


def measure(settings: Settings) -> dict[str, Any]:
    prompt_tokens = 300 if settings.quick else PROMPT_TOKENS
    blocks = TOGETHER * (-(-(prompt_tokens + ANSWER_TOKENS) // 128) + 1)
    spec = EngineSpec(
        store=None, models=settings.work, shape=replace(SMALL, max_position=2048),
        dram="512MiB", nvme="2GiB", eager=False, blocks=blocks + 1,
        vllm={"max_num_batched_tokens": BATCHED_TOKENS},
    )  # fmt: skip
    environment = model_threads(sorted(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        hosts = {}
        for side in SIDES:
            say(f"throughput: an engine, {side}")
            store = settings.work / "store" if side == "store" else None
            log = settings.work / f"throughput {side}.log"
            host = Host(replace(spec, store=store), log, environment)
            hosts[side] = stack.enter_context(host)
        for number in range(2):  # the first ones compile and touch memory for the first time
            one_round(hosts, -1 - number, prompt_tokens)
        before = hosts["store"].call(saved_bytes)
        numbers = tqdm(range(settings.rounds(ROUNDS)), desc="throughput", unit="round")
        rounds = [one_round(hosts, number, prompt_tokens) for number in numbers]
        saved = hosts["store"].call(saved_bytes) - before
    assert saved > 0, "the store was to save everything"
    return {
        "model": "8 layers", "requests_a_round": TOGETHER, "prompt_tokens": prompt_tokens,
        "output_tokens": ANSWER_TOKENS, "saved_bytes": saved, **summary(rounds),
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    plain, cost = (sum(result["step_ms"][name]) for name in ("plain", "cost"))
    detail = (
        f"{cost:.0f} ms more than {plain:.0f} ms for {result['requests_a_round']} requests, "
        f"{result['rounds']} rounds; of all seconds {result['ratio_of_all']}"
    )
    what = "throughput, all saved, nothing reused, over no connector"
    return [Line(what, result["ratio"], f">= {GOAL}", detail)]
