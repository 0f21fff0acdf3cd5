# SPDX-License-Identifier: Apache-2.0
"""What is said of the decision between waiting and computing: its outcome, and how good its
forecasts were. First of Costs alone, with a clock that stands; then of an engine whose disk reads
slowly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from attnstore_vllm.connector.costs import Costs
from attnstore_vllm.connector.messages import StepReport
from attnstore_vllm.connector.metrics import AttnStoreStats
from attnstore_vllm.connector.requests import RequestState
from attnstore_vllm.io.device import IoRequest, Op
from attnstore_vllm.policy.cost import StepCost
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.test_ahead import teach
from tests.vllm.test_step_times import output

# ---- Costs alone ----------------------------------------------------------------------------

DEADLINE_S = 1.0
COMING: Any = [SimpleNamespace(stop=stop) for stop in (1000, 2000, 3000)]
"""Computing 1,000 tokens takes a second."""


class Rig:
    """Costs that know what computing takes; of the disk, what the test says."""

    def __init__(self, clock: Any, *, computes_if_sooner: bool = True) -> None:
        self.clock = clock
        self.arrivals: list[float] | None = None
        self.stats = AttnStoreStats.empty()
        store: Any = SimpleNamespace(arrivals=lambda request_id, pieces: self.arrivals)
        self.costs = Costs(store, DEADLINE_S, computes_if_sooner)
        teach(self.costs, load_s=None, token_s=0.001)
        request: Any = SimpleNamespace(request_id="asks")
        self.state = RequestState(request, namespace=b"", tenant=b"", chunk_tokens=1000)

    def ask(self, arrivals: list[float] | None, ready_stop: int = 0) -> str | None:
        self.arrivals = arrivals
        return self.costs.why_not_wait(self.state, ready_stop, COMING)

    def end_wait(self) -> dict[str, list[float]]:
        """What is observed then."""
        self.costs.end_wait(self.state, self.stats)
        observed = dict(self.stats.data["observed"])
        self.stats.reset()
        return observed


@pytest.fixture
def clock() -> Iterator[Any]:
    with mock.patch("time.monotonic") as clock:
        clock.return_value = 50.0
        yield clock


def test_a_wait_and_its_forecast(clock: Any) -> None:
    """The forecast is that of the last piece that is waited for, as it was first said."""
    rig = Rig(clock)
    assert rig.ask([0.1, 0.2, 40.0]) is None
    clock.return_value += 0.1
    assert rig.ask([0.1, 0.9, 1.5]) is None
    clock.return_value += 0.2
    observed = rig.end_wait()
    assert observed.keys() == {"wait_seconds", "wait_over_forecast"}
    assert observed["wait_seconds"] == pytest.approx([0.3])
    assert observed["wait_over_forecast"] == pytest.approx([1.5])
    assert rig.end_wait() == {}, "a wait ends once"


def test_a_wait_before_its_forecast(clock: Any) -> None:
    """Others had the first looks, then the disk was not known: the forecast runs from its own
    time on, the wait from the beginning."""
    rig = Rig(clock)
    rig.state.waiting_since = 49.0
    assert rig.ask(None) is None
    clock.return_value += 0.25
    assert rig.ask([0.5, 30.0, 30.0]) is None
    clock.return_value += 0.25
    observed = rig.end_wait()
    assert observed["wait_seconds"] == pytest.approx([1.5])
    assert observed["wait_over_forecast"] == pytest.approx([0.5])


def test_a_wait_without_a_forecast(clock: Any) -> None:
    """The disk is not known; or it is slower than computing, and waited for all the same."""
    for arrivals in (None, [20.0, 30.0, 40.0]):
        rig = Rig(clock, computes_if_sooner=False)
        assert rig.ask(arrivals) is None
        clock.return_value += 0.5
        assert rig.end_wait() == {"wait_seconds": [0.5]}


def test_who_does_not_wait(clock: Any) -> None:
    """Nothing is observed of a wait that there was not."""
    rig = Rig(clock)
    assert rig.ask([1.5, 2.5, 3.5]) == "slower"
    assert rig.ask([1.5, 2.5, 2.5], ready_stop=1000) == "slower", "what is there saves nothing"
    assert rig.end_wait() == {}
    clock.return_value += DEADLINE_S - 0.01
    assert rig.ask([0.1, 0.2, 0.3]) is None
    clock.return_value += 0.01
    assert rig.ask([0.1, 0.2, 0.3]) == "deadline"
    assert rig.end_wait()["wait_seconds"] == pytest.approx([0.01])


def test_a_step_and_its_forecast(clock: Any) -> None:
    """Without what its loads have cost; and only of steps that compute prompts."""
    rig = Rig(clock)
    for name, tokens, seconds, wait_s, observed in (
        ("new", 1000, 2.002, 0.0, [2.0]),
        ("loads", 1000, 1.001, 4.0, [1.0]),
        ("quick", 500, 0.2505, 0.0, [0.5]),
        ("answer", 1, 0.5, 0.0, []),
    ):
        rig.stats.reset()
        number = rig.costs.step_planned(output({name: (0, tokens)}, {}))
        clock.return_value += seconds + wait_s
        rig.costs.step_ended(StepReport(number, load_wait_s=wait_s), rig.stats)
        found = rig.stats.data["observed"].get("step_over_forecast", [])
        assert found == pytest.approx(observed, rel=0.01), name


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
        if name in ("wait_seconds", "wait_over_forecast", "step_over_forecast"):
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
    slow = SlowReads(engine.store._keeper._device)

    def ask(numbers: range, **costs: Any) -> None:
        before = said(engine)
        for number in numbers:
            with mock.patch.multiple(engine.side._costs, **costs):
                second.append(engine.ask(PROMPTS[number]))
            loaded.append(sum(engine.loaded().values()))
            engine.wait_for(lambda: engine.store._keeper.reader.num_reading == 0)
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
        ask(LATE, _computes_if_sooner=False, _load_deadline_s=DEADLINE_OF_LATE_S)
    engine.check_quiet()
    return first, second, loaded, differences


def test_an_engine_counts_what_it_decides(engine: EngineHost) -> None:
    first, second, loaded, differences = engine.call(on_a_slow_disk)
    assert [a.content for a in second] == [a.content for a in first]
    assert loaded == [
        0 if number in (*SLOWER, *LATE) else 2 * CHUNK for number in range(len(PROMPTS))
    ]
    assert [{c: int(d[c]) for c in CAUSES if d[c]} for d in differences] == [
        {}, {"slower": len(SLOWER)}, {}, {"deadline": len(LATE)},
    ]  # fmt: skip
    learned, slower, waited, late = differences
    assert [d["wait_seconds, number"] for d in differences] == [len(LEARNED), 0, 1, 1]
    assert learned["wait_seconds"] > len(LEARNED) * 2 * READ_S * 0.9
    assert waited["wait_seconds"] > 2 * READ_S * 0.9
    assert late["wait_seconds"] >= DEADLINE_OF_LATE_S * 0.9
    # Where computing is sooner and the settings wait all the same, no time is said.
    assert [d["wait_over_forecast, number"] for d in differences] == [0, 0, 1, 0]
    forecast_s = waited["wait_seconds"] / waited["wait_over_forecast"]
    # Of a machine that others use, waits are long and differ, and so are forecasts.
    assert READ_S < forecast_s < 5 * learned["wait_seconds"] / len(LEARNED)
    assert slower["step_over_forecast, number"] >= len(SLOWER)
    assert slower["step_over_forecast"] > 0
