# SPDX-License-Identifier: Apache-2.0
"""What a load costs the turn that needs it, and whoever runs beside it, by its speed.

A real vLLM whose copies run beside the model, as slow as they are told to be
(tests/vllm/slow_copies.py).

exposed      A load takes as long as the prefill of the new tokens. Exposed is what its TTFT has
             above that of an HBM hit which computes as many tokens. Layer by layer, over waiting
             for all layers before the forward pass, which is a double. Each load is begun in the
             step that needs it: the cost model is not asked.
read_buffer  A load takes three times the prefill, and comes while another request generates. TTFT
             and the other's stall, with loads ahead as the cost model says, over none ahead. The
             model of loads is made to forget what it knew, and learns from some loads at that speed
             first; of steps it knows what it has seen.

What a prefill takes is measured before each load that is timed, and the copies' speed set by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from benchmarks.overlap_parts import in_engine
from benchmarks.overlap_parts.common import SHAPES, Host, Line, Settings, say, spread
from tests.vllm.engine import EngineSpec, store_settings
from tests.vllm.prompts import random_tokens
from tests.vllm.slow_copies import transfer

EXPOSED_GOAL, BUFFER_GOAL = 0.2, 0.75
HISTORY_TOKENS = 15 * 128
NEW_TOKENS = {"8 layers": 512, "24 layers": 256}
ROUNDS = {"8 layers": 20, "24 layers": 16}
LEARN_LOADS = 4


@contextmanager
def engine(settings: Settings, name: str, part: str) -> Iterator[tuple[Host, list[int], int]]:
    """A host with a history in its store, that history, and how many new tokens there are."""
    directory = settings.work / f"{part}, {name}"
    directory.mkdir()
    spec = EngineSpec(
        store=directory / "store",
        models=settings.work,
        shape=replace(SHAPES[name]),
        dram="512MiB",
        nvme="1GiB",
        blocks=96,
    )
    spec = replace(spec, transfer=transfer(store_settings(spec)))
    # Not bound by OpenMP: the copies' threads would be bound with the model's.
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    tokens = 128 * 3 if settings.quick else HISTORY_TOKENS
    history = random_tokens(part, tokens)
    say(f"{part}, {name}: an engine with slow copies, and {tokens} tokens of history")
    with Host(spec, directory / "log", environment) as host:
        host.call(in_engine.settle, history)
        yield host, history, NEW_TOKENS[name] // (4 if settings.quick else 1)


def models(settings: Settings) -> list[str]:
    return list(SHAPES)[: 1 if settings.quick else None]


def measure_exposed(settings: Settings) -> dict[str, Any]:
    results = []
    for name in models(settings):
        with engine(settings, name, "exposed") as (host, history, new):
            host.call(in_engine.calibrate, history, new, 1.0, 0)
            numbers = tqdm(range(settings.rounds(ROUNDS[name])), desc=name, unit="round")
            rounds = [host.call(in_engine.exposed_round, history, new, n) for n in numbers]
        exposed = {
            way: [one[way]["dram_ms"] - one[way]["hbm_ms"] for one in rounds]
            for way in ("layer_wise", "whole")
        }
        medians = {way: statistics.median(values) for way, values in exposed.items()}
        results.append(
            {
                "model": name, "history_tokens": len(history), "new_tokens": new,
                **{key: spread([one[way][key] for one in rounds for way in one])
                   for key in ("prefill_ms", "load_ms", "load_mib", "load_bytes_per_s", "hbm_ms")},
                "exposed_ms": {way: spread(values) for way, values in exposed.items()},
                "layer_wise_over_whole": round(medians["layer_wise"] / medians["whole"], 3),
            }
        )  # fmt: skip
    return {"models": results}


def exposed_lines(result: dict[str, Any]) -> list[Line]:
    return [
        Line(
            f"exposed load time, layer-wise over whole-request, {one['model']}",
            one["layer_wise_over_whole"],
            f"<= {EXPOSED_GOAL}",
            f"{one['exposed_ms']['layer_wise']['median']:.0f} over "
            f"{one['exposed_ms']['whole']['median']:.0f} ms of a load of "
            f"{one['load_ms']['median']:.0f}, "
            f"{one['exposed_ms']['whole']['rounds']} rounds",
        )
        for one in result["models"]
    ]


def measure_buffer(settings: Settings) -> dict[str, Any]:
    results = []
    for name in models(settings):
        with engine(settings, name, "read_buffer") as (host, history, new):
            speeds = []
            sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
            order = [True, False]
            for number in tqdm(range(settings.rounds(ROUNDS[name])), desc=name, unit="round"):
                speed = host.call(in_engine.calibrate, history, new, 3.0, number)
                if not number:
                    host.call(in_engine.learn, history, new, LEARN_LOADS)
                speeds.append({**speed, **host.call(in_engine.forecast, history, new)})
                for has_buffer in order:
                    found = host.call(in_engine.arrival, history, new, number, has_buffer)
                    sides[has_buffer].append(found)
                order.reverse()
        ratios = [_sum(a) / _sum(b) for a, b in zip(sides[True], sides[False], strict=True)]
        results.append(
            {
                "model": name, "history_tokens": len(history), "new_tokens": new,
                "loads_seen": LEARN_LOADS, **_side(speeds),
                "with": _side(sides[True]), "without": _side(sides[False]),
                "with_over_without": spread(ratios),
            }
        )  # fmt: skip
    return {"models": results}


def _sum(one: dict[str, Any]) -> float:
    return float(one["ttft_ms"] + one["stall_ms"])


def _side(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: spread([one[key] for one in found]) for key in found[0]}


def buffer_lines(result: dict[str, Any]) -> list[Line]:
    found = []
    for one in result["models"]:
        sides = [
            " + ".join(f"{one[side][key]['median']:.0f}" for key in ("ttft_ms", "stall_ms"))
            for side in ("with", "without")
        ]
        found.append(
            Line(
                f"TTFT and the other's stall, read buffer over none, {one['model']}",
                one["with_over_without"]["median"],
                f"<= {BUFFER_GOAL}",
                f"{sides[0]} over {sides[1]} ms, "
                f"{one['with']['layers_before']['median']:.0f} layers ahead, "
                f"{one['with_over_without']['rounds']} rounds",
            )
        )
    return found
