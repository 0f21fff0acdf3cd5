# SPDX-License-Identifier: Apache-2.0
"""Which way copies of each length go fastest here: the table that engines on this device have.

Loads of scattered pages, each one run, by DMA and by the kernel with several numbers of thread
blocks. A load goes by DMA from the length on from which DMA is never slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from attnstore_vllm.transfer.cuda_methods import (
    KIB,
    RULES,
    Copy,
    Method,
    Rule,
    Rules,
    keep_rules,
    only,
)
from benchmarks.gpu.rig import KvRig, KvShape, Row, in_turn

THREAD_BLOCKS = (8, 16, 24, 32, 48)
CLOSE = 1.05
"""So much slower than the fastest is as good, if it takes fewer multiprocessors."""
SHAPES = tuple(
    KvShape(f"{2 * heads} KiB runs", 16, heads, head_dim=32) for heads in (1, 2, 4, 8, 16, 32, 64)
)

Times = dict[int, list[float]]
"""Seconds of one shape's load by each number of thread blocks, 0: by DMA; by run bytes."""


def measure(
    num_tokens: int, rounds: int, path: Path | None = None, shapes: Sequence[KvShape] = SHAPES
) -> list[Row]:
    """Keeps the table too, in `path` (cuda_methods.rules_path)."""
    times = {shape.page_bytes: _times(shape, num_tokens, rounds) for shape in shapes}
    rules = rules_from(times)
    device = torch.cuda.get_device_name(torch.cuda.current_device())
    kept = keep_rules(device, rules, path)
    rows = []
    for run_bytes, found in times.items():
        by_kernel = min(found[1:])
        rows.append(
            Row(
                f"H2D, runs of {run_bytes / KIB:g} KiB", "kernel's time over DMA's",
                by_kernel / found[0], detail=f"DMA {1000 * found[0]:.2f} ms",
            )
        )  # fmt: skip
    rule = rules[Copy.LOAD][0]
    limit = rule.from_run_bytes / KIB if rule.method is Method.DMA else None
    detail = f"{rules[Copy.LOAD][-1].thread_blocks} thread blocks below; kept in {kept}"
    rows.append(Row("H2D", "DMA from KiB on", limit, detail=detail))
    return rows


def rules_from(times: Times) -> Rules:
    """The built-in table, with what was measured of loads.

    Args:
        times: of each length of runs, seconds by DMA and then by THREAD_BLOCKS.
    """
    lengths = sorted(times)
    limit = None
    for length in reversed(lengths):
        if times[length][0] > min(times[length][1:]):
            break
        limit = length
    below = [length for length in lengths if limit is None or length < limit]
    blocks = _thread_blocks([times[length][1:] for length in below])
    kernel = Rule(0, Method.KERNEL, blocks)
    if limit is None:
        loads: tuple[Rule, ...] = (kernel,)
    elif limit == lengths[0]:
        loads = (Rule(0, Method.DMA),)
    else:
        loads = (Rule(limit, Method.DMA), kernel)
    return {**RULES, Copy.LOAD: loads}


def _thread_blocks(times: Sequence[Sequence[float]]) -> int:
    """The smallest number that is close to the fastest, for each of these lengths."""
    for i, blocks in enumerate(THREAD_BLOCKS):
        if all(found[i] <= CLOSE * min(found) for found in times):
            return blocks
    return THREAD_BLOCKS[-1]


def _times(shape: KvShape, num_tokens: int, rounds: int) -> list[float]:
    rig = KvRig(shape, num_tokens, num_rows=1)
    try:
        ways = [only(Method.DMA), *(only(Method.KERNEL, blocks) for blocks in THREAD_BLOCKS)]
        return in_turn([partial(_load, rig, rules) for rules in ways], rounds)
    finally:
        rig.close()


def _load(rig: KvRig, rules: Rules) -> None:
    rig.engine.rules = rules
    rig.engine.load(rig.pages, rig.layers)
