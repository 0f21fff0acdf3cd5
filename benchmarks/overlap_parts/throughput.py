# SPDX-License-Identifier: Apache-2.0
"""Throughput while everything is saved and nothing is reused, over an engine without a connector.

Two engines with the same processors take turns *step by step*, with the same new prompts, so that
both compute the same batches; who is first changes with each step, and a step's with each round. A
shared machine is half as fast for a second and then is not: rounds of a few seconds by turns have
ratios from 0.7 to 1.4 (benchmarks/throughput.py, two servers), while neighbouring steps mostly see
the same machine.

`ratio` is the median of rounds, with an interval that has the true median in 95 of 100 cases;
`ratio_of_all` is of all seconds as they were; `ratio_of_steps` is made of the median cost of each
of a round's steps, which does not see what comes in another step each time. The *control* is the
same with two plain engines: how far from 1 it lies is what this machine adds.

What the store does beside the model (checksums, writing to NVMe) must not fall into the other's
turn. So each waits after its step until its store has nothing left to do, and what processor time
that took, beyond what it took without a store, is added to the step: as if the model had waited
for all of it. Behind a server it has another processor if one is free. What it takes from the step
beside it there (memory, caches) is not seen. That requests arrive is timed, as a step of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import comb
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import SMALL
from benchmarks.overlap_parts.common import Host, Line, Settings, model_threads, say, spread
from tests.vllm.engine import Engine, EngineSpec
from tests.vllm.prompts import random_tokens

GOAL = 0.98
TOGETHER = 16
PROMPT_TOKENS = 1000
ANSWER_TOKENS = 32
BATCHED_TOKENS = 2048
ROUNDS, CONTROL_ROUNDS = 40, 20
CALM_S = 0.02
"""After a step: OpenMP's threads go to sleep."""
SIDES = ("plain", "store")


def begin(engine: Engine, number: int, prompt_tokens: int) -> tuple[float, float]:
    """Submit a round's requests: seconds, and nothing afterwards."""
    prompts = [random_tokens(("throughput", number, i), prompt_tokens) for i in range(TOGETHER)]
    began = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, max_tokens=ANSWER_TOKENS, logprobs=None)
    return time.perf_counter() - began, 0.0


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
    """All steps of a round; the first of them is the requests' arrival."""
    order = list(SIDES)[:: 1 - 2 * (number % 2)]
    found = [_times({side: hosts[side].call(begin, number, prompt_tokens) for side in order})]
    while not hosts["plain"].call(is_over):
        order.reverse()
        found.append(_times({side: hosts[side].call(step) for side in order}))
    assert hosts["store"].call(is_over), "both were to take as many steps"
    return found


def _times(found: dict[str, tuple[float, float]]) -> StepTimes:
    (plain, idle), (store, busy) = found["plain"], found["store"]
    return StepTimes(plain, store, busy - idle)


def summary(rounds: Sequence[Sequence[StepTimes]]) -> dict[str, Any]:
    """The figures that do not depend on what was asked. Rounds have the same steps."""
    plain = [statistics.median(one.plain for one in steps) for steps in zip(*rounds, strict=True)]
    costs = [statistics.median(one.cost for one in steps) for steps in zip(*rounds, strict=True)]
    whole = {
        name: sum(getattr(one, name) for steps in rounds for one in steps)
        for name in ("plain", "store", "after")
    }
    all_plain = whole["plain"]
    ratios = [
        sum(one.plain for one in steps) / sum(one.plain + one.cost for one in steps)
        for steps in rounds
    ]
    return {
        "rounds": len(rounds),
        "steps_a_round": len(plain),
        "step_ms": {"plain": [round(1000 * s, 2) for s in plain],
                    "cost": [round(1000 * s, 2) for s in costs]},
        "seconds": {name: round(value, 3) for name, value in whole.items()},
        "ratio": round(statistics.median(ratios), 3),
        "interval": interval(ratios),
        "ratio_of_all": round(all_plain / (whole["store"] + whole["after"]), 3),
        "ratio_of_steps": round(sum(plain) / (sum(plain) + sum(costs)), 3),
        "ratio_of_rounds": spread(ratios),
        "round_ms": [
            [round(1000 * sum(getattr(one, name) for one in steps), 1) for name in whole]
            for steps in rounds
        ],
    }  # fmt: skip


def interval(values: Sequence[float]) -> list[float]:
    """Where the median of what these were drawn from is, in at least 95 of 100 cases: two of the
    values, whichever way they are distributed (with fewer than six of them in fewer cases)."""
    ordered, n = sorted(values), len(values)
    below, skipped = 0.0, 0
    while skipped < (n - 1) // 2 and (below := below + comb(n, skipped) / 2**n) <= 0.025:
        skipped += 1
    first = max(0, skipped - 1)
    return [round(ordered[first], 3), round(ordered[n - 1 - first], 3)]


def measure(settings: Settings) -> dict[str, Any]:
    prompt_tokens = 300 if settings.quick else PROMPT_TOKENS
    rounds, saved = _rounds(settings, ROUNDS, prompt_tokens, has_store=True)
    control, _ = _rounds(settings, CONTROL_ROUNDS, prompt_tokens, has_store=False)
    assert saved > 0, "the store was to save everything"
    return {
        "model": "8 layers", "requests_a_round": TOGETHER, "prompt_tokens": prompt_tokens,
        "output_tokens": ANSWER_TOKENS, "saved_bytes": saved, **summary(rounds),
        "control": summary(control),
    }  # fmt: skip


def _rounds(
    settings: Settings, number: int, prompt_tokens: int, *, has_store: bool
) -> tuple[list[list[StepTimes]], int]:
    """So many rounds, and the bytes saved in them."""
    blocks = TOGETHER * (-(-(prompt_tokens + ANSWER_TOKENS) // 128) + 1)
    spec = EngineSpec(
        store=None, models=settings.work, shape=replace(SMALL, max_position=2048),
        dram="512MiB", nvme="2GiB", eager=False, blocks=blocks + 1,
        vllm={"max_num_batched_tokens": BATCHED_TOKENS},
    )  # fmt: skip
    environment = model_threads(sorted(os.sched_getaffinity(0)))
    name = "throughput" if has_store else "control"
    with ExitStack() as stack:
        hosts = {}
        for side in SIDES:
            say(f"{name}: an engine, {side if has_store else 'plain'}")
            store = settings.work / "store" if has_store and side == "store" else None
            log = settings.work / f"{name} {side}.log"
            host = Host(replace(spec, store=store), log, environment)
            hosts[side] = stack.enter_context(host)
        for warm_up in range(2):  # the first ones compile and touch memory for the first time
            one_round(hosts, -1 - warm_up, prompt_tokens)
        before = hosts["store"].call(saved_bytes) if has_store else 0
        numbers = tqdm(range(settings.rounds(number)), desc=name, unit="round")
        rounds = [one_round(hosts, n, prompt_tokens) for n in numbers]
        saved = hosts["store"].call(saved_bytes) - before if has_store else 0
    return rounds, saved


def lines(result: dict[str, Any]) -> list[Line]:
    found = []
    for what, one, goal in (
        ("throughput, all saved, nothing reused, over no connector", result, f">= {GOAL}"),
        ("the same of two engines without one (control)", result["control"], ""),
    ):
        low, high = one["interval"]
        detail = (
            f"{low} to {high}; {one['rounds']} rounds of {result['requests_a_round']} requests; "
            f"of all seconds {one['ratio_of_all']}, by steps {one['ratio_of_steps']}"
        )
        found.append(Line(what, one["ratio"], goal, detail))
    return found
