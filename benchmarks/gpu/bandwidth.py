# SPDX-License-Identifier: Apache-2.0
"""Scattered 16-token blocks between HBM and the pool, over one large page-locked cudaMemcpyAsync.

Both move the same number of bytes; the large copy is between the same pool and one tensor. Times
are the host's, from the call to the last byte, so what a copy costs to begin with is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from attnstore_vllm.transfer.cuda_methods import Method, ReadOrder, Rules, only
from attnstore_vllm.transfer.cuda_read_buffer import READ_SIZE
from attnstore_vllm.transfer.worker_copies import LAYERS_A_SAVE
from benchmarks.gpu.rig import KvRig, KvShape, Row, begin_seconds, in_turn

AT_LEAST = 0.95
WAYS: dict[str, Rules] = {
    "DMA": only(Method.DMA),
    "DMA in the stream's order": only(Method.DMA, order=ReadOrder.STREAM),
    "read buffer": only(Method.BUFFER),
    **{f"kernel, {n} blocks": only(Method.KERNEL, n) for n in (8, 16, 24, 48)},
}
IN_ORDER, BUFFER = "DMA in the stream's order", "read buffer"


def ways(rig: KvRig) -> dict[str, Rules]:
    """ "rules" is what the engine does if it is not told otherwise: as measured here, if it was."""
    return {"rules": rig.rules, **WAYS}


def measure(shape: KvShape, num_tokens: int, rounds: int) -> Iterator[Row]:
    rig = KvRig(shape, num_tokens, num_rows=num_tokens // 16, read_size=READ_SIZE)
    try:
        yield from _direction(rig, "H2D", _loads(rig), rounds)
        yield from _direction(rig, "D2H", _saves(rig), rounds)
    finally:
        rig.close()


def _loads(rig: KvRig) -> dict[str, Callable[[], object]]:
    works: dict[str, Callable[[], object]] = {}
    for name, rules in ways(rig).items():
        works[name] = _by(rig, rules, partial(rig.engine.load, rig.pages, rig.layers))
        if name in ("rules", "DMA", IN_ORDER, BUFFER):
            works[f"{name}, by layer"] = _by(rig, rules, partial(_load_by_layer, rig))
    return works


def _saves(rig: KvRig) -> dict[str, Callable[[], object]]:
    works: dict[str, Callable[[], object]] = {}
    for name, rules in ways(rig).items():
        if name not in (IN_ORDER, BUFFER):  # what is saved goes by DMA then
            works[name] = _by(rig, rules, partial(_gather_and_drain, rig))
    for count in (1, LAYERS_A_SAVE):
        grouped = partial(_drain_by_layers, rig, count)
        works[f"rules, {count} layers at a time"] = _by(rig, rig.rules, grouped)
    for name in ("DMA", "kernel, 16 blocks"):
        works[f"{name}, no buffer"] = _by(
            rig, WAYS[name], partial(rig.engine.save, rig.pages, rig.layers)
        )
    return works


def _by(rig: KvRig, rules: Rules, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        rig.engine.rules = rules
        work()

    return run


def _load_by_layer(rig: KvRig) -> None:
    for layer in rig.layers:
        rig.engine.load(rig.pages, range(layer, layer + 1))


def _gather_and_drain(rig: KvRig) -> None:
    rows = np.arange(len(rig.pages))
    rig.engine.gather(rig.pages, rows, rig.layers)
    rig.engine.drain(rig.pages, rows, rig.layers)


def _drain_by_layers(rig: KvRig, count: int) -> None:
    rows = np.arange(len(rig.pages))
    for first in range(0, len(rig.layers), count):
        some = rig.layers[first : first + count]
        rig.engine.gather(rig.pages, rows, some)
        rig.engine.drain(rig.pages, rows, some)


def _direction(
    rig: KvRig, direction: str, works: dict[str, Callable[[], object]], rounds: int
) -> list[Row]:
    pool = rig.pool()[: rig.num_bytes]
    assert pool.is_pinned(), "the large copy would be slower than it can be"
    whole = torch.empty(rig.num_bytes, dtype=torch.uint8, device=rig.device)
    source, target = (pool, whole) if direction == "H2D" else (whole, pool)
    times = in_turn([lambda: target.copy_(source, non_blocking=True), *works.values()], rounds)
    large_s = times[0]
    what = f"{direction} {rig.shape.name}, {rig.shape.page_bytes >> 10} KiB pages"
    rows = [Row(what, "one large copy", 1.0, detail=_speed(rig, large_s))]
    for (name, work), took_s in zip(works.items(), times[1:], strict=True):
        goal = AT_LEAST if name == "rules" else None
        detail = f"{_speed(rig, took_s)}, begun in {begin_seconds(work) * 1000:.2f} ms"
        rows.append(Row(what, name, large_s / took_s, goal, detail=detail))
    return rows


def _speed(rig: KvRig, took_s: float) -> str:
    return f"{rig.num_bytes / took_s / 1e9:.1f} GB/s"
