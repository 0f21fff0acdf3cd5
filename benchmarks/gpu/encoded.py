# SPDX-License-Identifier: Apache-2.0
"""Slots that keep pages encoded: whether every bit comes back, and how fast, over one large copy of
the pages as they are. More than 1 is what PCIe alone could not do.

That kernels make the bytes that a processor makes, an engine looks at when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from attnstore_vllm.transfer.cuda_methods import Copy, Method, Rule, Rules, only
from attnstore_vllm.transfer.cuda_read_buffer import READ_SIZE
from benchmarks.gpu.rig import KvRig, KvShape, Row, in_turn

LOAD_GOAL, SAVE_GOAL = 1.25, 1.0
BLOCKS = (128, 256)
"""CTAs that decode; an engine takes 128 at least."""


def measure(shape: KvShape, num_tokens: int, rounds: int) -> Iterator[Row]:
    rig = KvRig(shape, num_tokens, num_rows=num_tokens // 16, is_encoded=True, read_size=READ_SIZE)
    try:
        yield _comes_back(rig)
        yield from _speeds(rig, rounds)
    finally:
        rig.close()


def save(rig: KvRig) -> None:
    rows = np.arange(len(rig.pages))
    rig.engine.gather(rig.pages, rows, rig.layers)
    rig.engine.wait(rig.engine.drain(rig.pages, rows, rig.layers))


def _comes_back(rig: KvRig) -> Row:
    """Saved, cleared, and loaded by the read buffer and by the kernel alone."""
    blocks = torch.from_numpy(rig.pages[:, 2].copy()).to(rig.device)
    were = [kv[blocks].clone() for kv in rig.kv]
    save(rig)
    wrong = 0
    for method in (Method.BUFFER, Method.KERNEL):
        rig.engine.rules = only(method)
        for kv in rig.kv:
            kv[blocks] = 0
        rig.engine.wait(rig.engine.load(rig.pages, rig.layers))
        wrong += sum(
            int((kv[blocks].view(torch.int16) != was.view(torch.int16)).sum())
            for kv, was in zip(rig.kv, were, strict=True)
        )
    total = rig.num_bytes  # two loads of numbers of two bytes
    what = f"encoded {rig.shape.name}: numbers that come back, parts of 1"
    share = rig.geometry.slot_bytes / rig.geometry.decoded.slot_bytes
    detail = f"{total} numbers, slots of {share:.3f} of their bytes"
    return Row(what, "all", 1 - wrong / total, 1.0, detail=detail, is_wrong=bool(wrong))


def _speeds(rig: KvRig, rounds: int) -> Iterator[Row]:
    pool = rig.pool()
    there = torch.empty(len(pool), dtype=torch.uint8, device=rig.device)
    scale = rig.num_bytes / len(pool)  # as if so many were copied
    loads: dict[str, Callable[[], object]] = {}
    for count in BLOCKS:
        for name, method in (("read buffer", Method.BUFFER), ("kernel", Method.KERNEL)):
            rules = _with_blocks(only(method), count)
            loads[f"{name}, {count} blocks"] = _by(rig, rules)
    times = in_turn([lambda: there.copy_(pool, non_blocking=True), *loads.values()], rounds)
    for name, took_s in zip(loads, times[1:], strict=True):
        goal = LOAD_GOAL if name == "read buffer, 128 blocks" else None
        yield _row(rig, "H2D", name, scale * times[0], took_s, goal)
    rig.engine.rules = rig.rules
    times = in_turn([lambda: pool.copy_(there, non_blocking=True), lambda: save(rig)], rounds)
    yield _row(rig, "D2H", "gathered and drained", scale * times[0], times[1], SAVE_GOAL)


def _by(rig: KvRig, rules: Rules) -> Callable[[], object]:
    def run() -> None:
        rig.engine.rules = rules
        rig.engine.load(rig.pages, rig.layers)

    return run


def _with_blocks(rules: Rules, count: int) -> Rules:
    loads: tuple[Rule, ...] = tuple(replace(rule, thread_blocks=count) for rule in rules[Copy.LOAD])
    return {**rules, Copy.LOAD: loads}


def _row(
    rig: KvRig, direction: str, how: str, large_s: float, took_s: float, goal: float | None
) -> Row:
    detail = f"{rig.num_bytes / took_s / 1e9:.1f} GB/s of pages"
    return Row(f"{direction} encoded {rig.shape.name}", how, large_s / took_s, goal, detail=detail)
