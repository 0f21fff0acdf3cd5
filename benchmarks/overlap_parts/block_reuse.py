# SPDX-License-Identifier: Apache-2.0
"""How soon blocks are used again: eight long requests end together, eight more wait for them.

Only eight fit into HBM. Nothing is reused and everything is saved. By turns, in three engines: one
without a connector, one with the store, and one with the store whose copies run beside the model,
as on a GPU, through its write buffer and at half a gigabyte a second. Each settles after its
turn, and the order of the turns changes.

scheduled      from the step that has ended the first eight, as its caller sees it, until vLLM has
               given blocks to the next
between        from the end of the forward pass that gave the last token of the first eight to the
               beginning of the one that writes to their blocks
first_token    from the first of these to the last one's first token
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import SMALL
from benchmarks.overlap_parts.common import (
    BLOCK_TOKENS,
    Host,
    Line,
    Settings,
    model_threads,
    say,
    spread,
)
from tests.vllm.engine import Engine, EngineSpec, store_settings
from tests.vllm.prompts import random_tokens
from tests.vllm.slow_copies import copies, transfer

GOAL = 1.1
TOGETHER = 8
PROMPT_TOKENS = 1500
ANSWER_TOKENS = 8
ROUNDS = 8
SAVE_BYTES_PER_S = 0.5e9
FIGURES = ("scheduled_ms", "between_ms", "first_token_ms")
SIDES = ("plain", "store", "buffer")


@dataclass
class Clock:
    """When what happened in the engine of this process."""

    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    """Forward passes."""
    scheduled: dict[str, float] = field(default_factory=dict)
    """By vLLM's own name of the request, when the step that begins it was planned."""


_clock = Clock()


def watch(engine: Engine) -> None:
    """Called once, before round()."""
    (model,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.model)
    model.register_forward_pre_hook(lambda *_: _clock.began.append(time.perf_counter()))
    model.register_forward_hook(lambda *_: _clock.ended.append(time.perf_counter()))
    schedule = engine.scheduler.schedule

    def timed(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        now = time.perf_counter()
        _clock.scheduled.update({new.req_id: now for new in output.scheduled_new_reqs})
        return output

    engine.scheduler.schedule = timed
    if engine.spec.transfer is not None:
        copies().saves.bytes_per_s = SAVE_BYTES_PER_S


def round_ms(engine: Engine, number: int, prompt_tokens: int) -> dict[str, float]:
    """The figures of one round, in ms."""
    prompts = [random_tokens(("reuse", number, i), prompt_tokens) for i in range(2 * TOGETHER)]
    numbers = [
        engine.submit(prompt, max_tokens=ANSWER_TOKENS if i < TOGETHER else 1, logprobs=None)
        for i, prompt in enumerate(prompts)
    ]
    first, waiting = numbers[:TOGETHER], numbers[TOGETHER:]
    names = [engine.request(number).request_id for number in waiting]
    while not engine.done.issuperset(first):
        assert engine.done.isdisjoint(first), "they were to end together"
        assert not engine.done.intersection(waiting)
        engine.step()
    ended, last_pass = time.perf_counter(), _clock.ended[-1]
    assert not any(name in _clock.scheduled for name in names), "they were to wait"
    passes = len(_clock.began)
    engine.finish(*waiting)
    answered = time.perf_counter()
    times = [_clock.scheduled[name] for name in names]
    assert len(set(times)) == 1, "they were to begin together"
    found = {
        "scheduled_ms": 1000 * (times[0] - ended),
        "between_ms": 1000 * (_clock.began[passes] - last_pass),
        "first_token_ms": 1000 * (answered - ended),
    }
    for name in first:
        engine.forget(name)
    engine.drain()
    if engine.spec.store is not None:
        engine.settle()
        assert engine.loaded() == {"dram": 0, "nvme": 0}
    return found


def _spec(settings: Settings, side: str, prompt_tokens: int) -> EngineSpec:
    # Their blocks, and a few that are not enough for one more.
    blocks = TOGETHER * -(-(prompt_tokens + ANSWER_TOKENS) // BLOCK_TOKENS) + 2
    spec = EngineSpec(
        store=settings.work / f"store {side}" if side != "plain" else None,
        models=settings.work, shape=replace(SMALL, max_position=2048),
        dram="512MiB", nvme="2GiB", eager=False,
        blocks=blocks + 1,
        vllm={"max_num_batched_tokens": max(TOGETHER * prompt_tokens, 2048)},
    )  # fmt: skip
    if side == "buffer":
        spec = replace(spec, transfer=transfer(store_settings(spec)))
    return spec


def measure(settings: Settings) -> dict[str, Any]:
    prompt_tokens = 300 if settings.quick else PROMPT_TOKENS
    environment = model_threads(sorted(os.sched_getaffinity(0)))
    times: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        hosts = {}
        for side in SIDES:
            say(f"block_reuse: an engine, {side}")
            spec = _spec(settings, side, prompt_tokens)
            host = Host(spec, settings.work / f"reuse {side}.log", environment)
            hosts[side] = stack.enter_context(host)
            host.call(watch)
            host.call(round_ms, -1, prompt_tokens)
        order = list(SIDES)
        for number in tqdm(range(settings.rounds(ROUNDS)), desc="block_reuse", unit="round"):
            for side in order:
                times[side].append(hosts[side].call(round_ms, number, prompt_tokens))
            order.append(order.pop(0))
    ratios = {
        side: {
            figure: spread([a[figure] / b[figure] for a, b in zip(times[side], times["plain"],
                                                                  strict=True)])
            for figure in FIGURES
        }
        for side in SIDES[1:]
    }  # fmt: skip
    return {
        "requests": TOGETHER, "prompt_tokens": prompt_tokens,
        "save_bytes_per_s_of_buffer": SAVE_BYTES_PER_S,
        "ms": {side: {figure: spread([one[figure] for one in found]) for figure in FIGURES}
               for side, found in times.items()},
        "over_plain": ratios,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    found = []
    for side, ratios in result["over_plain"].items():
        for figure in FIGURES:
            ms = [result["ms"][name][figure]["median"] for name in (side, "plain")]
            found.append(
                Line(
                    f"reuse of blocks, {figure.removesuffix('_ms')}, {side} over no connector",
                    ratios[figure]["median"],
                    f"<= {GOAL}",
                    f"{ms[0]:.1f} over {ms[1]:.1f} ms, {ratios[figure]['rounds']} rounds",
                )
            )
    return found
