# SPDX-License-Identifier: Apache-2.0
"""What an engine whose disk reads slowly says of its decisions between waiting and computing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from attnstore_vllm.io.device import IoRequest, Op
from attnstore_vllm.policy.cost import StepCost
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

# ---- an engine ------------------------------------------------------------------------------

READ_S = 0.08
"""Far longer than computing a chunk, also on a machine that has something else to do."""
LATE_READ_S = 0.5
DEADLINE_OF_LATE_S = 0.02
LEARNED, SLOWER, WAITED, LATE = range(5), range(5, 7), range(7, 8), range(8, 9)
"""Of the prompts: those that teach what a read takes; those that are computed sooner; one that
waits for what it is told; one that is computed after its deadline."""
PROMPTS = [random_tokens(("costs", number), 2 * CHUNK + 1) for number in range(LATE.stop)]


class SlowReads:
    """The device's reads begin one after the other, `read_s` apart."""

    def __init__(self, device: Any) -> None:
        self.read_s = READ_S
        self._submit = device.submit
        self._device = device
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._timers: list[threading.Timer] = []

    def submit(self, requests: Sequence[IoRequest]) -> None:
        reads = [request for request in requests if request.op is Op.READ]
        self._begin([request for request in requests if request.op is not Op.READ])
        for read in reads:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + self.read_s
            self._timers.append(threading.Timer(self._free_at - now, self._begin, ([read],)))
            self._timers[-1].start()

    def _begin(self, requests: Sequence[IoRequest]) -> None:
        with self._lock:
            self._submit(requests)

    @contextmanager
    def planted(self) -> Iterator[None]:
        with mock.patch.object(self._device, "submit", self.submit):
            try:
                yield
            finally:
                for timer in self._timers:
                    timer.join()


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine()


Said = dict[str, float]


def said(engine: Engine) -> Said:
    """The metrics so far; the last of them travel with a step."""
    engine.ask(random_tokens("nudge", 5))
    found = {cause: engine.metric("recomputations", cause) for cause in CAUSES}
    for metric in engine.llm.get_metrics():
        name = metric.name.removeprefix("vllm:attnstore_")
        if name in ("wait_seconds", "wait_forecast_ratio", "step_forecast_ratio"):
            found[name], found[f"{name}, number"] = metric.sum, metric.count
    return found


CAUSES = ("deadline", "slower", "lost", "copy_failed")


def on_a_slow_disk(engine: Engine) -> tuple[list[Answer], list[Answer], list[int], list[Said]]:
    """First and second answers to all prompts, and tokens loaded for the second ones; and what
    the metrics say of each of the four kinds of them."""
    first = []
    for prompt in PROMPTS:
        engine.forget_hbm()
        first.append(engine.ask(prompt))
    engine.evict_dram()
    engine.forget_hbm()
    engine.loaded()
    second, loaded, differences = [], [], []
    slow = SlowReads(engine.device)

    def ask(numbers: range, **costs: Any) -> None:
        before = said(engine)
        for number in numbers:
            with mock.patch.multiple(engine.side.costs, **costs):
                second.append(engine.ask(PROMPTS[number]))
            loaded.append(sum(engine.loaded().values()))
            engine.wait_for(lambda: engine.store.thread.reader.num_reading == 0)
        after = said(engine)
        differences.append({name: after[name] - before[name] for name in after})

    slow_model = StepCost()
    for count in range(1, 20):
        slow_model.observe(float(count), [(0, count)], 0)
    with slow.planted():
        ask(LEARNED, _computes_if_sooner=False)
        ask(SLOWER, _computes_if_sooner=True)
        ask(WAITED, _computes_if_sooner=True, _steps=slow_model)
        slow.read_s = LATE_READ_S
        ask(LATE, _computes_if_sooner=False, load_deadline_s=DEADLINE_OF_LATE_S)
    engine.check_quiet()
    return first, second, loaded, differences


def test_an_engine_counts_what_it_decides(engine: EngineHost) -> None:
    first, second, loaded, differences = engine.call(on_a_slow_disk)
    assert [a.content for a in second] == [a.content for a in first]
    assert loaded == [
        0 if number in (*SLOWER, *LATE) else 2 * CHUNK for number in range(len(PROMPTS))
    ]
    assert [{c: int(d[c]) for c in CAUSES if d[c]} for d in differences] == [
        {},
        {"slower": len(SLOWER)},
        {},
        {"deadline": len(LATE)},
    ]
    learned, slower, waited, late = differences
    assert [d["wait_seconds, number"] for d in differences] == [len(LEARNED), 0, 1, 1]
    assert learned["wait_seconds"] > len(LEARNED) * 2 * READ_S * 0.9
    assert waited["wait_seconds"] > 2 * READ_S * 0.9
    assert late["wait_seconds"] >= DEADLINE_OF_LATE_S * 0.9
    # Where computing is sooner and the settings wait all the same, no time is said.
    assert [d["wait_forecast_ratio, number"] for d in differences] == [0, 0, 1, 0]
    forecast_s = waited["wait_seconds"] / waited["wait_forecast_ratio"]
    # Of a machine that others use, waits are long and differ, and so are forecasts.
    assert READ_S < forecast_s < 5 * learned["wait_seconds"] / len(LEARNED)
    assert slower["step_forecast_ratio, number"] >= len(SLOWER)
    assert slower["step_forecast_ratio"] > 0
