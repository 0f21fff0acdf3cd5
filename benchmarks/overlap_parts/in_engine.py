# SPDX-License-Identifier: Apache-2.0
"""What runs in the engine's own process: requests that are timed, and copies that are slowed down.

The model has one processor and the copies another, as on a GPU, whose copy engines take nothing
from the model; on a machine with one processor they share it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

from attnstore_vllm.policy.cost import LoadRate
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.transfer.plan import LoadPlan
from tests.vllm.engine import Engine, Tokens
from tests.vllm.prompts import random_tokens
from tests.vllm.slow_copies import copies

TIMED: dict[str, Any] = {
    "logprobs": None,
    "extra_args": {"kv_transfer_params": {"attnstore": {"store": False}}},
}
PREFILLS_FIRST, PREFILLS, PREFILLS_KEPT = 12, 3, 12
"""Measured before the first round, before each later one, and of which the median counts."""
LATEST = 3
"""Of these, those that say how fast the machine is at this moment."""
UNDISTURBED = 8
"""Tokens of the other request before the new one comes, and as many after it."""

_prefills_ms: deque[float] = deque(maxlen=PREFILLS_KEPT)


def settle(engine: Engine, history: Tokens) -> None:
    """Store the history, computed as usual, give model and copies their processors, and have loads
    submitted when a forward pass begins.

    vLLM has loads ahead submitted when the forward pass is launched, which on a GPU is when it
    begins; on this machine it is over by then.
    """
    engine.ask([*history, 1])
    engine.settle()
    worker = copies().worker
    begin_step, start_load = worker.begin_step, worker.start_load

    def begin_and_load(plan: StepPlan) -> None:
        begin_step(plan)
        start_load()

    worker.begin_step = begin_and_load  # type: ignore[method-assign]
    worker.start_load = lambda: None  # type: ignore[method-assign]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    for stream in (copies().loads, copies().saves):
        assert stream._thread.native_id is not None
        os.sched_setaffinity(stream._thread.native_id, cores[1:] or cores)


def first_token_ms(engine: Engine, prompt: Tokens) -> float:
    """From a request's arrival to its first token, with nothing else to do."""
    began = time.perf_counter()
    number = engine.submit(prompt, **TIMED)
    while not engine.step():
        pass
    ms = 1000 * (time.perf_counter() - began)
    engine.finish(number)
    engine.drain()
    return ms


def from_dram_ms(engine: Engine, history: Tokens, new: Tokens) -> float:
    """The same, of a request whose history is in DRAM only."""
    empty_hbm(engine)
    engine.loaded()
    ms = first_token_ms(engine, [*history, *new])
    assert engine.loaded() == {"dram": len(history), "nvme": 0}
    return ms


def from_hbm_ms(engine: Engine, history: Tokens, new: Tokens) -> float:
    """The same, of one whose history is in HBM."""
    ms = first_token_ms(engine, [*history, *new])
    assert engine.loaded() == {"dram": 0, "nvme": 0}
    return ms


def empty_hbm(engine: Engine) -> None:
    engine.drain()
    assert engine.llm.reset_prefix_cache()
    engine.ask([20, 21])  # the next request waits until the workers have looked at their weights
    engine.drain()


def calibrate(
    engine: Engine, history: Tokens, num_new: int, times: float, number: int
) -> dict[str, float]:
    """Slow loads down so that one of `history` takes so many times the prefill of the new tokens.

    The prefill is the TTFT of an HBM hit as it has been of late, and is measured before each round:
    a shared machine is half as fast for minutes, and for moments.
    """
    first_token_ms(engine, [*history, number + 1])  # then the history is in HBM
    for i in range(PREFILLS if number else PREFILLS_FIRST):
        new = random_tokens(("calibrate", number, i), num_new)
        _prefills_ms.append(from_hbm_ms(engine, history, new))
    return slow_down(engine, history, statistics.median(_prefills_ms), times)


def slow_down(
    engine: Engine, history: Tokens, prefill_ms: float, times: float = 1.0
) -> dict[str, float]:
    """Let a load of `history` take so many times a prefill of `prefill_ms`."""
    num_bytes = engine.side.geometry.token_bytes() * len(history)
    rate = num_bytes / (times * prefill_ms / 1000)
    copies().loads.bytes_per_s = rate
    return {
        "prefill_ms": prefill_ms,
        "load_ms": times * prefill_ms,
        "load_mib": num_bytes / 2**20,
        "load_bytes_per_s": rate,
    }


@contextmanager
def synchronous(engine: Engine) -> Iterator[list[int]]:
    """No load is ahead of the step that needs it, whatever the speeds are."""
    with mock.patch.object(engine.side.costs, "layers_before", return_value=0):
        yield []


@contextmanager
def heard(engine: Engine) -> Iterator[list[int]]:
    """How many layers each load is told to have ahead, as it is."""
    costs, answers = engine.side.costs, list[int]()
    layers_before = costs.layers_before

    def hear(*args: int) -> int:
        answers.append(layers_before(*args))
        return answers[-1]

    with mock.patch.object(costs, "layers_before", hear):
        yield answers


@contextmanager
def whole_requests() -> Iterator[None]:
    """A double of layer-wise loading: each forward pass begins when all layers are there."""
    loads = copies().worker.loads
    begin = loads.begin

    def begin_and_wait(plans: Sequence[LoadPlan], *, whole: bool) -> None:
        begin(plans, whole=True)

    with mock.patch.object(loads, "begin", begin_and_wait):
        yield


def exposed_round(
    engine: Engine, history: Tokens, num_new: int, number: int
) -> dict[str, dict[str, float]]:
    """By way of loading: TTFT in ms from DRAM, of a load as long as the prefill, and from HBM.

    The machine's speed changes from one pass to the next. So HBM hits stand before and after each
    DRAM hit, whose `hbm_ms` is their mean; and what a load takes is the median of the last three.
    The order of ways changes by `number`. The history is in HBM before and after.
    """
    ways = ["layer_wise", "whole"][:: 1 - 2 * (number % 2)]
    found = {}
    hits = [from_hbm_ms(engine, history, random_tokens((number, "first"), num_new))]
    for way in ways:
        _prefills_ms.append(hits[-1])
        speed = slow_down(engine, history, statistics.median(list(_prefills_ms)[-LATEST:]))
        new = [random_tokens((number, way, i), num_new) for i in range(2)]
        with synchronous(engine), whole_requests() if way == "whole" else nullcontext():
            dram_ms = from_dram_ms(engine, history, new[0])
        hits.append(from_hbm_ms(engine, history, new[1]))
        found[way] = {"dram_ms": dram_ms, "hbm_ms": sum(hits[-2:]) / 2, **speed}
    return found


def learn(engine: Engine, history: Tokens, num_new: int, loads: int) -> None:
    """Let the cost model forget what loads took before they were slowed down, and see `loads` of
    them. Of the lengths of steps it knows what it has seen."""
    engine.side.costs._loads = LoadRate()
    with synchronous(engine):
        for i in range(loads):
            from_dram_ms(engine, history, random_tokens(("learn", i), num_new))


def forecast(engine: Engine, history: Tokens, num_new: int) -> dict[str, float]:
    """What the cost model says now."""
    costs, stop = engine.side.costs, len(history)
    num_bytes = int(engine.side.geometry.token_bytes() * stop)
    return {
        "load_forecast_ms": 1000 * costs._loads.seconds(num_bytes),
        "step_forecast_ms": 1000 * costs._steps.step_seconds(stop, stop + num_new),
    }


def arrival(
    engine: Engine, history: Tokens, num_new: int, number: int, has_buffer: bool
) -> dict[str, Any]:
    """A request with its history in DRAM comes while another one generates.

    Returns its TTFT, and by how much the other's tokens came later until then than so many usually
    take: what a median step takes before the arrival and after it.
    """
    empty_hbm(engine)
    engine.loaded()
    other = engine.submit(random_tokens((number, "other"), 64), max_tokens=2000, **TIMED)
    engine.step()
    usual = _steps_s(engine)
    prompt = [*history, *random_tokens((number, has_buffer), num_new)]
    said, tokens = list[str](), 0
    with heard(engine) if has_buffer else synchronous(engine) as answers:
        began = time.perf_counter()
        asked = engine.submit(prompt, **TIMED)
        while asked not in said:
            said = engine.step()
            tokens += other in said
        ttft_s = time.perf_counter() - began
    engine.finish(asked)
    usual_s = statistics.median([*usual, *_steps_s(engine)])
    engine.abort(other)
    engine.drain()
    engine.forget(other)
    assert engine.loaded() == {"dram": len(history), "nvme": 0}
    return {
        "ttft_ms": 1000 * ttft_s,
        "stall_ms": 1000 * (ttft_s - tokens * usual_s),
        "usual_ms": 1000 * usual_s,
        "layers_before": max(answers, default=0),
    }


def _steps_s(engine: Engine) -> list[float]:
    """Lengths of steps in which the other request alone generates."""
    times = [time.perf_counter()]
    for _ in range(UNDISTURBED):
        engine.step()
        times.append(time.perf_counter())
    return [b - a for a, b in pairwise(times)]
