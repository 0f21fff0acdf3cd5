# SPDX-License-Identifier: Apache-2.0
"""How much slower a stream of bf16 matrix products is while loads run beside it at full speed.

By turns without and with loads. A kernel that does nothing holds both back until the host has
given all of it to the streams. The loads outlast the products; whether they did is looked at, and a
round in which they did not does not count.
"""

from __future__ import annotations

import statistics

import torch

from attnstore_vllm.transfer.engine import StreamEvent
from benchmarks.gpu.bandwidth import WAYS
from benchmarks.gpu.rig import KvRig, KvShape, Row, begin_seconds, in_turn

AT_MOST_PERCENT = 3.0
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


def measure(shape: KvShape, num_tokens: int, rounds: int, size: int) -> list[Row]:
    rig = KvRig(shape, num_tokens, num_rows=0)
    try:
        products = Products(size, 8)
        products.alone_s()
        # Long enough for the clocks to be what they are under load.
        products = Products(size, max(8, int(8 * 0.15 / products.alone_s())))
        what = f"slowdown of matrix products, % ({rig.shape.name})"
        return [_one_way(rig, products, what, name, rounds) for name in WAYS]
    finally:
        rig.close()


def _one_way(rig: KvRig, products: Products, what: str, name: str, rounds: int) -> Row:
    rig.engine.rules = WAYS[name]
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
    goal = AT_MOST_PERCENT if name == "rules" else None
    if not beside:
        return Row(what, name, None, goal, True, "the loads never outlasted the products")
    slowdown = 100 * (statistics.median(beside) / statistics.median(alone) - 1)
    speed = products.flop / statistics.median(alone) / 1e12
    return Row(
        what,
        name,
        slowdown,
        goal,
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
