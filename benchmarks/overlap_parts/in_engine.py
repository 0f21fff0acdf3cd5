# SPDX-License-Identifier: Apache-2.0
"""What runs in the engine's own process: requests that are timed, and copies that are slowed down.

The model has one processor and the copies another, as on a GPU, whose copy engines take nothing
from the model; on a machine with one processor they share it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

from attnstore_vllm.policy.overlap import LoadRate
from attnstore_vllm.transfer.plan import LoadPlan
from tests.vllm.engine import Engine, Tokens
from tests.vllm.prompts import random_tokens
from tests.vllm.slow_copies import copies

TIMED: dict[str, Any] = {
    "logprobs": None,
    "extra_args": {"kv_transfer_params": {"attnstore": {"store": False}}},
}
CALIBRATIONS = 5
UNDISTURBED = 24
"""Tokens of the other request before the new one comes."""


def settle(engine: Engine, history: Tokens) -> None:
    """Store the history, computed as usual, and give model and copies their processors."""
    engine.ask([*history, 1])
    engine.settle()
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


def calibrate(engine: Engine, history: Tokens, num_new: int, times: float) -> dict[str, float]:
    """Slow loads down so that one of `history` takes so many times the prefill of the new tokens.

    The prefill is the TTFT of an HBM hit.
    """
    new = [random_tokens(("calibrate", i), num_new) for i in range(CALIBRATIONS + 1)]
    from_dram_ms(engine, history, new[0])
    prefill_ms = statistics.median(from_hbm_ms(engine, history, n) for n in new[1:])
    geometry = engine.side._geometry
    num_bytes = geometry.token_bytes() * len(history)
    rate = num_bytes / (times * prefill_ms / 1000)
    copies().loads.bytes_per_s = rate
    return {"prefill_ms": round(prefill_ms, 2), "load_ms": round(times * prefill_ms, 2),
            "load_mib": round(num_bytes / 2**20, 1), "load_bytes_per_s": round(rate)}  # fmt: skip


@contextmanager
def synchronous(engine: Engine) -> Iterator[list[int]]:
    """No load is ahead of the step that needs it, whatever the speeds are."""
    with mock.patch.object(engine.side._costs, "layers_before", return_value=0):
        yield []


@contextmanager
def heard(engine: Engine) -> Iterator[list[int]]:
    """How many layers each load is told to have ahead, as it is."""
    costs, answers = engine.side._costs, list[int]()
    layers_before = costs.layers_before

    def hear(*args: int) -> int:
        answers.append(layers_before(*args))
        return answers[-1]

    with mock.patch.object(costs, "layers_before", hear):
        yield answers


@contextmanager
def whole_requests() -> Iterator[None]:
    """A double of layer-wise loading: each forward pass begins when all layers are there."""
    loads = copies().worker._loads
    begin = loads.begin

    def begin_and_wait(plans: Sequence[LoadPlan], *, whole: bool) -> None:
        begin(plans, whole=True)

    with mock.patch.object(loads, "begin", begin_and_wait):
        yield


def exposed_round(
    engine: Engine, history: Tokens, num_new: int, number: int
) -> dict[str, dict[str, float]]:
    """TTFT in ms by way of loading, from DRAM and then from HBM. The order changes by `number`."""
    ways = ["layer_wise", "whole"][:: 1 - 2 * (number % 2)]
    found = {}
    for way in ways:
        new = [random_tokens((number, way, i), num_new) for i in range(2)]
        with synchronous(engine), whole_requests() if way == "whole" else nullcontext():
            dram_ms = from_dram_ms(engine, history, new[0])
        found[way] = {"dram_ms": dram_ms, "hbm_ms": from_hbm_ms(engine, history, new[1])}
    return found


def learn(engine: Engine, history: Tokens, num_new: int, loads: int) -> dict[str, Any]:
    """Let the cost model forget what loads took before they were slowed down, and see `loads` of
    them. Of the lengths of steps it knows what it has seen. Returns what it says then."""
    costs = engine.side._costs
    costs._loads = LoadRate()
    with synchronous(engine):
        for number in range(loads):
            from_dram_ms(engine, history, random_tokens(("learn", number), num_new))
    num_bytes, stop = int(engine.side._geometry.token_bytes() * len(history)), len(history)
    return {
        "loads_seen": loads,
        "load_forecast_ms": round(1000 * costs._loads.seconds(num_bytes), 2),
        "prefill_forecast_ms": round(1000 * costs._steps.seconds(stop, stop + num_new, -1.0), 2),
        "layers_before": costs.layers_before(num_bytes, 0, stop, stop + num_new),
    }


def arrival(
    engine: Engine, history: Tokens, num_new: int, number: int, has_buffer: bool
) -> dict[str, Any]:
    """A request with its history in DRAM comes while another one generates.

    Returns its TTFT, and by how much the other's tokens came later until then than they had done
    before: the sum of what each of the times between two exceeds their undisturbed median by.
    """
    empty_hbm(engine)
    engine.loaded()
    other = engine.submit(random_tokens((number, "other"), 64), max_tokens=2000, **TIMED)
    times: list[float] = []
    while len(times) <= UNDISTURBED:
        engine.step()
        times.append(time.perf_counter())
    usual_s = statistics.median(b - a for a, b in pairwise(times))
    prompt = [*history, *random_tokens((number, has_buffer), num_new)]
    stall_s, last, said = 0.0, times[-1], list[str]()
    with heard(engine) if has_buffer else synchronous(engine) as answers:
        began = time.perf_counter()
        asked = engine.submit(prompt, **TIMED)
        while asked not in said:
            said = engine.step()
            now = time.perf_counter()
            if other in said:
                stall_s += max(0.0, now - last - usual_s)
                last = now
    engine.abort(other)
    engine.finish(asked)
    engine.drain()
    engine.forget(other)
    assert engine.loaded() == {"dram": len(history), "nvme": 0}
    return {"ttft_ms": 1000 * (now - began), "stall_ms": 1000 * stall_s,
            "usual_ms": 1000 * usual_s, "layers_before": max(answers, default=0)}  # fmt: skip
