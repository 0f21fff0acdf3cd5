# SPDX-License-Identifier: Apache-2.0
"""What is said of the decision between waiting and computing: its outcome, and how good its
forecasts were; and which loads begin before their step. With a clock that stands."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.policy.cost import PROBE_EVERY
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.media import MediaNames, RequestMedia
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.report import report_of
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.types import Cause
from tests.vllm_objects import Clock, as_store, output, request

DEADLINE_S = 1.0


@dataclass
class Coming:
    """A piece that is on its way. Computing 1,000 tokens takes a second."""

    stop: int


COMING: Any = [Coming(stop) for stop in (1000, 2000, 3000)]


class Disk:
    """Of it the store says what the test says."""

    def __init__(self) -> None:
        self.said: list[float] | None = None
        self.read_each_s: float | None = None
        self.thread = SimpleNamespace(reader=SimpleNamespace(lacks_room=False))

    def read_s(self, num_reads: int) -> float | None:
        return None if self.read_each_s is None else num_reads * self.read_each_s

    def arrivals(self, request_id: str, pieces: Any) -> list[float] | None:
        return self.said


class Rig:
    """Costs that know what computing takes; of the disk, what the test says."""

    def __init__(self, clock: Clock, *, computes_if_sooner: bool = True) -> None:
        self.disk = as_store(Disk())
        self.stats = StepStats()
        self.costs = Costs(self.disk, DEADLINE_S, computes_if_sooner, clock=clock)
        teach(self.costs, load_s=None, token_s=0.001)
        asks = request("asks")
        media = RequestMedia(MediaNames(), asks)
        self.state = RequestState(asks, namespace=b"", tenant=b"", chunk_tokens=1000, media=media)

    def ask(self, arrivals: list[float] | None, ready_stop: int = 0) -> str | None:
        self.disk.said = arrivals
        return self.costs.why_not_wait(self.state, ready_stop, COMING)

    def end_wait(self) -> dict[str, list[float]]:
        """What is observed then."""
        self.costs.end_wait(self.state, self.stats)
        observed = dict(self.stats.data["observed"])
        self.stats = StepStats()
        return observed


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_wait_and_its_forecast(clock: Clock) -> None:
    """The forecast is that of the last piece that is waited for, as it was first said."""
    rig = Rig(clock)
    assert rig.ask([0.1, 0.2, 40.0]) is None
    clock.now += 0.1
    assert rig.ask([0.1, 0.9, 1.5]) is None
    clock.now += 0.2
    observed = rig.end_wait()
    assert observed.keys() == {"wait_seconds", "wait_forecast_ratio"}
    assert observed["wait_seconds"] == pytest.approx([0.3])
    assert observed["wait_forecast_ratio"] == pytest.approx([1.5])
    assert rig.end_wait() == {}, "a wait ends once"


def test_a_wait_before_its_forecast(clock: Clock) -> None:
    """Others had the first looks, then the disk was not known: the forecast runs from its own
    time on, the wait from the beginning."""
    rig = Rig(clock)
    rig.state.waiting.since = 49.0
    assert rig.ask(None) is None
    clock.now += 0.25
    assert rig.ask([0.5, 30.0, 30.0]) is None
    clock.now += 0.25
    observed = rig.end_wait()
    assert observed["wait_seconds"] == pytest.approx([1.5])
    assert observed["wait_forecast_ratio"] == pytest.approx([0.5])


def test_a_wait_without_a_forecast(clock: Clock) -> None:
    """The disk is not known; or it is slower than computing, and waited for all the same."""
    for arrivals in (None, [20.0, 30.0, 40.0]):
        rig = Rig(clock, computes_if_sooner=False)
        assert rig.ask(arrivals) is None
        clock.now += 0.5
        assert rig.end_wait() == {"wait_seconds": [0.5]}


def test_who_does_not_wait(clock: Clock) -> None:
    """Nothing is observed of a wait that there was not."""
    rig = Rig(clock)
    assert rig.ask([1.5, 2.5, 3.5]) == "slower"
    assert rig.ask([1.5, 2.5, 2.5], ready_stop=1000) == "slower", "what is there saves nothing"
    assert rig.end_wait() == {}
    clock.now += DEADLINE_S - 0.01
    assert rig.ask([0.1, 0.2, 0.3]) is None
    clock.now += 0.01
    assert rig.ask([0.1, 0.2, 0.3]) == "deadline"
    assert rig.end_wait()["wait_seconds"] == pytest.approx([0.01])


def test_a_step_and_its_forecast(clock: Clock) -> None:
    """Without what its loads have cost; and only of steps that compute prompts."""
    rig = Rig(clock)
    for name, tokens, seconds, wait_s, observed in (
        ("new", 1000, 2.002, 0.0, [2.0]),
        ("loads", 1000, 1.001, 4.0, [1.0]),
        ("quick", 500, 0.2505, 0.0, [0.5]),
        ("answer", 1, 0.5, 0.0, []),
    ):
        rig.stats = StepStats()
        number = rig.costs.times.planned(output({name: (0, tokens)}, {}))
        clock.now += seconds + wait_s
        rig.costs.step_ended(StepReport(number, load_wait_s=wait_s), rig.stats)
        found = rig.stats.data["observed"].get("step_forecast_ratio", [])
        assert found == pytest.approx(observed, rel=0.01), name


# ---- loads ahead of their step ------------------------------------------------------------

LAYERS = 10
BYTES = 1_000_000


def make_costs(*, ahead_layers: int = LAYERS, step_tokens: int = 1 << 30) -> Costs:
    store: Any = None
    return Costs(store, 1.0, True, ahead_layers=ahead_layers, step_tokens=step_tokens)


def teach(costs: Costs, *, load_s: float | None, token_s: float | None) -> None:
    """BYTES take load_s to load, a token token_s to compute."""
    measured = [(BYTES, load_s)] * 20 if load_s is not None else []
    costs.step_ended(StepReport(0, measured=measured), StepStats())
    for count in range(100, 3100, 100) if token_s is not None else ():
        assert token_s is not None
        costs._steps.observe(0.001 + token_s * count, [(0, count)], 0)


def run_others(costs: Costs, number: int, step_s: float = 1e-6) -> None:
    """So many requests run, in steps of this length."""
    costs.times.num_running, costs.times.usual_s = number, step_s


@pytest.mark.parametrize(
    ("load_s", "layers"),
    # Computing 1,000 tokens takes a second: 9 tenths of it hide 9 of 10 layers behind the first.
    [(0.5, 0), (0.9, 0), (2.0, 6), (5.0, 9), (100.0, 10)],
)
def test_a_load_that_its_step_does_not_hide_begins_before_it(load_s: float, layers: int) -> None:
    costs = make_costs()
    teach(costs, load_s=load_s, token_s=0.001)
    run_others(costs, 1)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == layers


def test_a_state_pays_where_computing_takes_longer_than_reading_it(clock: Clock) -> None:
    """A millisecond for a token; three groups are read."""
    rig = Rig(clock)
    assert rig.costs.state_pays(0, 1, 3), "nothing is known of reads"
    rig.disk.read_each_s = 0.2
    assert rig.costs.state_pays(1000, 1700, 3)
    assert not rig.costs.state_pays(1000, 1500, 3)
    assert rig.costs.state_pays(1000, 1500, 2)


@pytest.mark.parametrize(
    ("others", "step_s", "layers"),
    # In its step the load would hold up all for 1.1 s.
    [
        (0, 0.1, 0), (1, 0.27, 6), (1, 0.28, 0), (2, 0.54, 6), (2, 0.56, 0), (9, 2.4, 6),
        (9, 2.5, 0),
    ],
)  # fmt: skip
def test_a_load_ahead_is_worth_the_steps_that_it_costs(
    others: int, step_s: float, layers: int
) -> None:
    costs = make_costs()
    teach(costs, load_s=2.0, token_s=0.001)
    run_others(costs, others, step_s)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == layers


def test_a_load_ahead_that_takes_longer_than_computing_does_not_pay() -> None:
    """No step waits for such loads, so that none tells what they cost."""
    costs = make_costs()
    teach(costs, load_s=2.0, token_s=0.001)
    run_others(costs, 1, 0.2)
    layers = costs.layers_before(BYTES, 0, 5000, 6000)
    assert layers == 6
    ahead_s = costs.ahead_s(BYTES, layers, LAYERS)
    assert ahead_s == pytest.approx(2.0 * 6 / 10 + 4 * 0.2)
    for tokens, pays in ((1900, False), (2100, True)):
        told = [costs.copy_pays(0, tokens, ahead_s) for _ in range(PROBE_EVERY - 1)]
        assert told == [pays] * len(told), tokens
        assert costs.copy_pays(0, tokens, ahead_s), "now and then one is tried"
    assert costs.ahead_s(BYTES, 0, LAYERS) is None, "it is for its step"
    run_others(costs, 0, 0.2)
    assert costs.ahead_s(BYTES, layers, LAYERS) == pytest.approx(1.2), "steps are empty"
    unknown = make_costs()
    assert unknown.ahead_s(BYTES, layers, LAYERS) is None
    beside = make_costs(ahead_layers=0)
    teach(beside, load_s=2.0, token_s=0.001)
    assert beside.ahead_s(BYTES, layers, LAYERS) is None


def test_loads_that_are_before_it_count() -> None:
    costs = make_costs()
    teach(costs, load_s=0.9, token_s=0.001)
    run_others(costs, 1)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == 0
    assert costs.layers_before(BYTES, 9 * BYTES, 5000, 6000) >= 8


def test_only_the_first_step_of_a_long_prompt_counts() -> None:
    costs = make_costs(step_tokens=100)
    teach(costs, load_s=0.9, token_s=0.001)
    run_others(costs, 1)
    assert costs.layers_before(BYTES, 0, 5000, 6000) >= 8


def test_without_measurements_every_load_is_for_its_step() -> None:
    for load_s, token_s in ((None, 0.001), (5.0, None)):
        costs = make_costs()
        teach(costs, load_s=load_s, token_s=token_s)
        run_others(costs, 1)
        assert costs.layers_before(BYTES, 0, 5000, 6000) == 0


def test_where_copies_do_not_run_beside_the_model() -> None:
    costs = make_costs(ahead_layers=0)
    teach(costs, load_s=5.0, token_s=0.001)
    run_others(costs, 1)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == 0


def test_what_a_request_waited_is_in_its_report() -> None:
    clock = Clock()
    rig = Rig(clock)
    rig.state.request.num_prompt_tokens = 3000
    rig.ask([0.1, 0.2, 0.3])
    clock.now += 0.25
    rig.end_wait()
    rig.ask([0.1, 0.2, 0.3])
    clock.now += 0.5
    rig.end_wait()
    rig.state.counted.sources, rig.state.counted.in_hbm = {"dram": 1000, "nvme": 500}, 200
    rig.state.counted.why_computed = Cause.DEADLINE
    assert report_of(rig.state) == {
        "prompt_tokens": 3000,
        "hbm_tokens": 200,
        "dram_tokens": 1000,
        "nvme_tokens": 500,
        "moved_tokens": 0,
        "own_pass_tokens": 0,
        "approximate": None,
        "computed_tokens": 1300,
        "why_computed": "deadline",
        "why_not_stored": None,
        "waited_ms": 750,
    }
    rig.state.load_failed = Cause.COPY_FAILED
    assert report_of(rig.state)["why_computed"] == "copy_failed"


def test_what_came_from_others_is_in_the_report() -> None:
    rig = Rig(Clock())
    rig.state.request.num_prompt_tokens = 3000
    rig.state.counted.sources = {"dram": 1000, "peers": 500, "shared": 300}
    report = report_of(rig.state)
    assert (report["peers_tokens"], report["shared_tokens"]) == (500, 300)
    assert (report["nvme_tokens"], report["computed_tokens"]) == (0, 1200)
