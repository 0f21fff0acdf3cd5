# SPDX-License-Identifier: Apache-2.0
"""Which way copies of each length go fastest here: the table that engines on this device have.

Loads of scattered pages, each one run, layer by layer as a forward pass has them: by DMA, read at
any time and in the stream's order, by the kernel with several numbers of thread blocks, and through
the read buffer. A load goes by DMA from the length on from which DMA is never slower than the
kernel; and through the buffer where that is clearly faster than the better of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from attnstore_vllm.transfer.cuda_methods import (
    KIB,
    RULES,
    Copy,
    Method,
    ReadOrder,
    Rule,
    Rules,
    keep_rules,
)
from attnstore_vllm.transfer.cuda_read_buffer import READ_SIZE
from benchmarks.gpu.rig import KvRig, KvShape, Row, in_turn

THREAD_BLOCKS = (8, 16, 24, 32, 48)
CLOSE = 1.05
"""So much slower than the fastest is as good, if it takes fewer multiprocessors."""
SHAPES = tuple(
    KvShape(f"{2 * heads} KiB runs", 16, heads, head_dim=32) for heads in (1, 2, 4, 8, 16, 32, 64)
)
DMA = tuple(Rule(0, Method.DMA, order=order) for order in ReadOrder)
KERNEL = tuple(Rule(0, Method.KERNEL, blocks) for blocks in THREAD_BLOCKS)
BUFFER = tuple(Rule(0, Method.BUFFER, blocks) for blocks in (16, 32))

Times = dict[int, dict[Rule, float]]
"""Seconds of one shape's load in each of these ways, by run bytes."""


def measure(
    num_tokens: int, rounds: int, path: Path | None = None, shapes: Sequence[KvShape] = SHAPES
) -> Iterator[Row]:
    """Keeps the table too, in `path` (cuda_methods.rules_path), when all lengths were measured."""
    times: Times = {}
    for shape in shapes:
        times[shape.page_bytes] = found = _times(shape, num_tokens, rounds)
        by_kernel = min(found[way] for way in KERNEL)
        any_order, in_order = (found[way] for way in DMA)
        what = f"H2D by layer, runs of {shape.page_bytes / KIB:g} KiB"
        took = f"DMA {1000 * any_order:.2f} ms, kernel {1000 * by_kernel:.2f} ms"
        yield Row(what, "kernel's time over DMA's", by_kernel / any_order, detail=took)
        took = f"{1000 * in_order:.2f} ms"
        yield Row(what, "DMA in the stream's order over any", in_order / any_order, detail=took)
        through = min(found[way] for way in BUFFER)
        direct, took = min(any_order, in_order, by_kernel), f"{1000 * through:.2f} ms"
        yield Row(what, "read buffer over the better of the others", through / direct, detail=took)
    rules = rules_from(times)
    device = torch.cuda.get_device_name(torch.cuda.current_device())
    kept = keep_rules(device, rules, path)
    for rule in rules[Copy.LOAD]:
        how = f"{rule.method.value}, {rule.thread_blocks} thread blocks, {rule.order.value} order"
        yield Row("H2D by rule, from KiB on", how, rule.from_run_bytes / KIB, detail=f"in {kept}")


def rules_from(times: Times) -> Rules:
    """The built-in table, with what was measured of loads."""
    lengths = sorted(times)
    fastest = {length: min(times[length][way] for way in KERNEL) for length in lengths}
    limit = None
    for length in reversed(lengths):
        if min(times[length][way] for way in DMA) > fastest[length]:
            break
        limit = length
    blocks = _thread_blocks([times[n] for n in lengths if limit is None or n < limit])
    kernel = Rule(0, Method.KERNEL, blocks)
    # One order for all of them: what makes the difference is how the driver reads.
    above = [times[n] for n in lengths if limit is not None and n >= limit]
    dma = min(DMA, key=lambda way: sum(found[way] for found in above))
    loads: list[Rule] = []
    for length in lengths:
        is_dma = limit is not None and length >= limit
        rule = _or_buffer(times[length], dma if is_dma else kernel, DMA if is_dma else KERNEL)
        if not loads or replace(rule, from_run_bytes=loads[0].from_run_bytes) != loads[0]:
            loads.insert(0, replace(rule, from_run_bytes=length if loads else 0))
    return {**RULES, Copy.LOAD: tuple(loads)}


def _or_buffer(times: dict[Rule, float], direct: Rule, ways: Sequence[Rule]) -> Rule:
    """The buffer takes HBM, and the kernel multiprocessors behind it: only for a clear gain."""
    best = min(times[way] for way in BUFFER)
    if best * CLOSE > min(times[way] for way in ways):
        return direct
    return next(way for way in BUFFER if times[way] <= CLOSE * best)


def _thread_blocks(times: Sequence[dict[Rule, float]]) -> int:
    """The smallest number that is close to the fastest, for each of these lengths."""
    for way in KERNEL:
        if all(found[way] <= CLOSE * min(found[one] for one in KERNEL) for found in times):
            return way.thread_blocks
    return THREAD_BLOCKS[-1]


def _times(shape: KvShape, num_tokens: int, rounds: int) -> dict[Rule, float]:
    rig = KvRig(shape, num_tokens, num_rows=1, read_size=READ_SIZE)
    try:
        ways = (*DMA, *KERNEL, *BUFFER)
        works = [partial(_load, rig, {**RULES, Copy.LOAD: (way,)}) for way in ways]
        return dict(zip(ways, in_turn(works, rounds), strict=True))
    finally:
        rig.close()


def _load(rig: KvRig, rules: Rules) -> None:
    rig.engine.rules = rules
    for layer in rig.layers:
        rig.engine.load(rig.pages, range(layer, layer + 1))
