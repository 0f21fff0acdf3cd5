# SPDX-License-Identifier: Apache-2.0
"""How much slower a stream of bf16 matrix products is while loads run beside it at full speed.

By turns without and with loads. A kernel that does nothing holds both back until the host has
given all of it to the streams. The loads outlast the products; whether they did is looked at, and a
round in which they did not does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from attnstore_vllm.transfer.cuda_methods import Copy, Method, Rules, choose
from attnstore_vllm.transfer.cuda_read_buffer import READ_SIZE
from attnstore_vllm.transfer.engine import StreamEvent
from benchmarks.gpu.bandwidth import IN_ORDER, ways
from benchmarks.gpu.rig import KvRig, KvShape, Row, begin_seconds, in_turn

AT_MOST_PERCENT = 3.0
DMA_FROM_BYTES = 32 << 10
"""Of shorter runs, DMA takes the host most of the time: rounds of it never end."""
_TRIES = 4
CYCLES_PER_S = 2e9
"""Of the device, about; no less."""


class Products:
    """`count` products of square matrices, one after the other, on the current stream."""

    def __init__(self, size: int, count: int) -> None:
        shape, device = (size, size), torch.device("cuda", torch.cuda.current_device())
        self._left = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self._right = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self._out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._count = count
        self.flop = 2.0 * size**3 * count

    def begin(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Before the first and after the last."""
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        marks[0].record()
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._out)
        marks[1].record()
        return marks

    def alone_s(self) -> float:
        torch.cuda.synchronize()
        first, last = self.begin()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


def measure(shape: KvShape, num_tokens: int, rounds: int, size: int) -> Iterator[Row]:
    rig = KvRig(shape, num_tokens, num_rows=0, read_size=READ_SIZE)
    try:
        products = Products(size, 8)
        products.alone_s()
        # Long enough for the clocks to be what they are under load.
        products = Products(size, max(8, int(8 * 0.15 / products.alone_s())))
        what = f"slowdown of matrix products, % ({rig.shape.name})"
        for name, rules in ways(rig).items():
            way = choose(rules, Copy.LOAD, shape.page_bytes)
            if name == IN_ORDER:  # whether it is faster is measured elsewhere
                continue
            if way.method is Method.DMA and shape.page_bytes < DMA_FROM_BYTES:
                left_out = f"left out: by DMA only from runs of {DMA_FROM_BYTES >> 10} KiB on"
                yield Row(what, name, None, detail=left_out)
                continue
            yield _one_way(rig, products, rules, Row(what, name, None), rounds)
    finally:
        rig.close()


def _one_way(rig: KvRig, products: Products, rules: Rules, row: Row, rounds: int) -> Row:
    rig.engine.rules = rules
    (load_s,) = in_turn([lambda: rig.engine.load(rig.pages, rig.layers)], 3)
    begin_s = begin_seconds(lambda: rig.engine.load(rig.pages, rig.layers))
    alone: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    for _ in range(_TRIES * rounds):
        alone.append(products.alone_s())
        count = 2 + int(1.5 * alone[-1] / load_s)
        took_s, were_busy, rate = _beside(rig, products, count, begin_s)
        if were_busy:
            beside.append(took_s)
            rates.append(rate)
        if len(beside) == rounds:
            break
    goal = AT_MOST_PERCENT if row.how == "rules" else None
    if not beside:
        why = "the loads never outlasted the products"
        return replace(row, goal=goal, at_most=True, detail=why)
    slowdown = 100 * (statistics.median(beside) / statistics.median(alone) - 1)
    speed = products.flop / statistics.median(alone) / 1e12
    return replace(
        row,
        value=slowdown,
        goal=goal,
        at_most=True,
        detail=f"{speed:.0f} TFLOP/s alone, loads at {statistics.median(rates) / 1e9:.1f} GB/s",
    )


def _beside(
    rig: KvRig, products: Products, count: int, begin_s: float
) -> tuple[float, bool, float]:
    """Seconds of the products, whether loads ran all the while, and bytes a second loaded."""
    torch.cuda.synchronize()
    rig.engine.measured()
    torch.cuda._sleep(int(CYCLES_PER_S * (1.5 * count * begin_s + 0.005)))
    events: list[StreamEvent] = [rig.engine.load(rig.pages, rig.layers) for _ in range(count)]
    first, last = products.begin()
    last.synchronize()
    were_busy = not events[-1].done()
    rig.engine.wait(events[-1])
    measured = rig.engine.measured()
    rate = sum(num_bytes for num_bytes, _ in measured) / sum(took for _, took in measured)
    return float(first.elapsed_time(last)) / 1000, were_busy, rate
