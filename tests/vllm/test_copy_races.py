# SPDX-License-Identifier: Apache-2.0
"""Loads beside the model, with every interleaving of their pieces and of what becomes of a request.

Goal: no forward pass attends to a byte that is not there yet, no copy writes to a block that is
another's, each load ahead is reported once, and nothing stays held: when the request finishes, is
aborted (while it loads, while the report is on its way, when vLLM knows of it, while it runs), or
its copies fail; and its blocks are taken at once by one that computes, or loads, or shares them.
Method: real scheduler, scripted model, copies that go on only when the test says so. The pieces of
a load (the partly filled block, then each layer) are carried out before a step and at its end, in
all ways; the rest only when somebody else uses the blocks, or waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.errors import CopyError
from tests.vllm.scripted_worker import BLOCK, LAYERS
from tests.vllm.stepped import SteppedEngine, prompt
from tests.vllm.test_async_scheduling import wait_until_quiet

HISTORY = 56
"""Tokens that are stored: a chunk, and a tail whose last block is half full."""
PIECES = 1 + LAYERS
BLOCKS = 1 + 2 + 5
"""vLLM's own, those of a request that runs all the time, and room for one more request."""
SHARED = 2
"""So many more are enough for another that shares its history."""
NOT_STORED = {"attnstore": {"store": False}}
Places = tuple[tuple[int, int], ...]
"""How many pieces, on each rank, are over before the step after that which begins the load, and at
its end, when the worker looks what is over."""
PLACES = [(places,) for places in combinations_with_replacement(range(PIECES + 1), 2)]


class When(NamedTuple):
    """Something happens in a step after that which begins the load."""

    step: int
    is_run: bool
    """The step has run, and the scheduler does not know of it yet; else before it is planned."""


def whens(depth: int) -> list[When]:
    """Until the request runs, with so many steps in flight."""
    return [When(step, is_run) for step in range(1, depth + 2) for is_run in (False, True)]


Start = Callable[..., SteppedEngine]
steps_in_flight = pytest.mark.parametrize("depth", [1, 2, 3])


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """start(depth, options of SteppedEngine): an engine that has the histories A and B stored."""
    started: list[SteppedEngine] = []

    def start(depth: int, **options: Any) -> SteppedEngine:
        options = {"num_blocks": BLOCKS, "rows": 8, "seed": 0, **options}
        engine = SteppedEngine(model, tmp_path / f"{len(started)}", depth=depth, **options)
        started.append(engine)
        for name in ("A", "B"):
            engine.leave(name, HISTORY)
        return engine

    yield start
    for engine in started:
        if not engine.is_broken:
            wait_until_quiet(engine.ours)
        engine.close()


class Race:
    """Requests that continue A, one after the other, beside one that decodes all the time.

    Args:
        other: whose history (or none that is stored) the one has that waits for the blocks.
    """

    def __init__(self, engine: SteppedEngine, other: str = "nothing stored") -> None:
        self.engine = engine
        self.seen: Counter[str] = Counter()
        """How far loads were when their request was aborted."""
        self._other = other
        self._number = 0

    def begin(self, max_tokens: int = 3) -> str:
        """Its load is begun, and no piece is over. Returns the request's name."""
        self._number += 1
        engine, name = self.engine, f"{self._number}"
        engine.begin_case()
        engine.add("runs", prompt("runs", 4), 16, params=NOT_STORED)
        engine.step()
        engine.step()
        engine.add(name, [*engine.histories["A"], *prompt(name, 9)], max_tokens, params=NOT_STORED)
        history = engine.histories.get(self._other) or prompt(self._other, HISTORY)
        engine.add("other", [*history, *prompt(f"beside {name}", 10)], 6, params=NOT_STORED)
        engine.step()
        self.check_begun(name)
        return name

    def check_begun(self, name: str) -> None:
        assert self.engine.load_state(name) == "loading"
        assert all((loads.over, loads.pending) == (0, PIECES) for loads in self.engine.loads)

    def play(
        self, places: Places, when: When | None = None, event: Callable[[], None] | None = None
    ) -> None:
        """The steps in which pieces are carried out and the event comes; then others use the
        blocks while what is left is carried out."""
        engine = self.engine
        events = [event] if event is not None else []

        def happen() -> None:
            while events:
                events.pop()()

        for step in range(1, 5):
            if step == 1:
                for rank, (before, at_end) in enumerate(places):
                    engine.loads[rank].go_on_to(before)
                    engine.workers[rank].at_end = partial(engine.loads[rank].go_on_to, at_end)
            if when == (step, False):
                happen()
            elif when == (step, True):
                engine.before_update = happen
            engine.step()
            for worker in engine.workers:
                worker.at_end = lambda: None
        engine.before_update = lambda: None
        assert not events
        engine.step()
        engine.step()
        for loads in engine.loads:
            loads.go_on_to(PIECES)
        engine.step()
        engine.abort("runs")
        engine.settle()

    def abort_in_all_ways(self, all_places: Sequence[Places]) -> tuple[int, int]:
        """Returns in how many cases, of how many, the other had a load of its own."""
        num_others = 0
        cases = list(product(all_places, whens(self.engine.depth)))
        for places, when in cases:
            name = self.begin()
            self.play(places, when, partial(self.abort, name))
            assert self.engine.reported.pop(name) == 1
            num_others += self.engine.reported["other"]
            assert self.engine.reported.total() <= 1
        assert self.seen.keys() >= {"loading", "reported", "received", "running"}
        return num_others, len(cases)

    def abort(self, name: str) -> None:
        self.seen[self.engine.load_state(name)] += 1
        self.engine.abort(name)


@steps_in_flight
@pytest.mark.parametrize("layers_before", range(1, LAYERS + 1))
def test_it_finishes(start: Start, depth: int, layers_before: int) -> None:
    race = Race(start(depth))
    race.engine.layers_before = layers_before
    for places, max_tokens in product(PLACES, (1, 3)):
        name = race.begin(max_tokens)
        race.play(places)
        assert race.engine.reported == {name: 1}


@steps_in_flight
@pytest.mark.parametrize("layers_before", [1, 2])
def test_it_is_aborted_and_another_computes(start: Start, depth: int, layers_before: int) -> None:
    race = Race(start(depth))
    race.engine.layers_before = layers_before
    num_others, _ = race.abort_in_all_ways(PLACES)
    assert num_others == 0


@steps_in_flight
def test_it_is_aborted_and_another_loads(start: Start, depth: int) -> None:
    race = Race(start(depth), other="B")
    race.engine.layers_before = 1
    num_others, num_cases = race.abort_in_all_ways(PLACES)
    assert num_others == num_cases


@steps_in_flight
@pytest.mark.parametrize("replays", [False, True])
def test_it_is_aborted_and_another_shares(start: Start, depth: int, replays: bool) -> None:
    """The other attends to blocks that are filled for the one that has gone; also in graphs that
    call no hook."""
    race = Race(start(depth, num_blocks=BLOCKS + SHARED), other="A")
    race.engine.layers_before = 1
    race.engine.replays = lambda: replays
    num_others, num_cases = race.abort_in_all_ways(PLACES[:: 1 + replays])
    assert 0 < num_others < num_cases, "nobody shares, or all do"


class RaceAfterReset(Race):
    """The request was running, lost its blocks in a reset, and loads anew in the next step."""

    def begin(self, max_tokens: int = 3) -> str:
        engine, name = self.engine, super().begin(max_tokens + 20)
        engine.loads[0].go_on()
        while engine.load_state(name) != "running":
            engine.step()
        while engine.in_flight:
            engine.finish_oldest()
        engine.reported.clear()
        engine.loads[0].mark()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        self.check_begun(name)
        return name


@steps_in_flight
def test_it_is_reset_and_then_aborted(start: Start, depth: int) -> None:
    race = RaceAfterReset(start(depth))
    race.engine.layers_before = 1
    race.abort_in_all_ways(PLACES[::2])


class RaceAfterPreemption(Race):
    """The request ran, was preempted while its load was open since the news of it are late, and
    loads anew. Three older ones need a block each in the same step; two of them end with it."""

    def __init__(self, engine: SteppedEngine, layers_before: int) -> None:
        super().__init__(engine)
        self._layers_before = layers_before
        """Of the load that is open."""
        self._random = Random(0)

    def begin(self, max_tokens: int = 3) -> str:
        self._number += 1
        engine, name = self.engine, f"{self._number}"
        (loads,) = engine.loads
        engine.begin_case()
        engine.layers_before, loads.is_late = self._layers_before, True
        # It runs first in step 2; or `depth` after 3, in which its load is told.
        first = 3 + engine.depth if self._layers_before else 2
        full = first + self._random.randrange(1, 3)  # then the older ones' blocks are
        length = BLOCK + 1 - full  # step 0 computes it, and each one after it a token
        for older, more in (("runs", 12), ("older 1", 0), ("older 2", 0)):
            engine.add(older, prompt(older, length), full + 1 + more, params=NOT_STORED)
        engine.step()
        engine.step()
        tokens = [*engine.histories["A"], *prompt(name, 9)]
        engine.add(name, tokens, max_tokens + 5, params=NOT_STORED)
        request = engine.scheduler.requests[name]
        is_open = (False, False)
        for step in range(2, full + engine.depth):  # its steps in flight end first
            assert not request.num_preemptions
            if step == 3:
                loads.go_on_to(1 + self._layers_before)
            is_open = (
                name in engine.ours.plans._loading,
                bool(engine.worker.side.loads._open),
            )
            engine.step()
        assert request.num_preemptions
        assert is_open == (True, True), "for the scheduler side, and for the worker"
        if self._random.random() < 0.5:
            loads.hear()
        history = prompt("nothing stored", HISTORY)
        engine.add("other", [*history, *prompt(f"beside {name}", 10)], 6, params=NOT_STORED)
        assert engine.reported == ({name: 1} if self._layers_before else {})
        engine.reported.clear()
        loads.mark()
        engine.layers_before = 1
        while not loads.pending:
            engine.step()
        self.check_begun(name)
        return name

    def play(
        self, places: Places, when: When | None = None, event: Callable[[], None] | None = None
    ) -> None:
        self.engine.loads[0].hear()
        super().play(places, when, event)


@steps_in_flight
@pytest.mark.parametrize("layers_before", [0, 1])
def test_it_is_preempted(start: Start, depth: int, layers_before: int) -> None:
    """And finishes, or is aborted; the news of the load that it has lost come before the next one
    is begun, or behind it.

    Only where news are late: what vLLM preempts has run, and no step of it is in flight. Its first
    pass has waited for all layers, and with news that are not late that step's report says so.
    """
    race = RaceAfterPreemption(start(depth, num_blocks=1 + 3 + 5), layers_before)
    race.abort_in_all_ways(PLACES[::4])
    for places in PLACES[::2]:
        name = race.begin()
        race.play(places)
        assert race.engine.reported == {name: 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_that_are_not_as_quick(start: Start, depth: int) -> None:
    """One has told early and the other late; both have to drain, and to report."""
    race = Race(start(depth, num_ranks=2))
    race.engine.layers_before = 1
    ranks = [((0, one), (other, other)) for one, other in product((0, 1, 2, PIECES), repeat=2)]
    race.abort_in_all_ways(ranks)
    for places in ranks:
        name = race.begin()
        race.play(places)
        assert race.engine.reported == {name: 1}


# ---- copies that fail ------------------------------------------------------------------


@steps_in_flight
@pytest.mark.parametrize("failing", range(PIECES))
def test_a_load_ahead_that_fails_is_computed(start: Start, depth: int, failing: int) -> None:
    """And counted; or reported all the same, if its request has gone meanwhile."""
    race = Race(start(depth))
    engine = race.engine
    engine.layers_before = LAYERS
    for when in (None, *whens(depth)):
        name = race.begin()
        race.seen.clear()
        engine.loads[0].go_on_to(failing)
        engine.loads[0].fail_next(CopyError("injected"))
        race.play(((failing + 1, 0),), when, partial(race.abort, name) if when else None)
        assert engine.reported == {name: 1}
        is_known = race.seen.keys().isdisjoint(("loading", "reported"))
        assert engine.count("recomputations:copy_failed") == is_known


@pytest.mark.parametrize("failing", range(PIECES))
def test_a_load_ahead_that_fails_on_one_rank(start: Start, failing: int) -> None:
    """The other may have told already: it drains, before the blocks are given away."""
    race = Race(start(2, num_ranks=2))
    engine = race.engine
    engine.layers_before = 2
    for over, when in product(range(PIECES + 1), (None, *whens(2)[1:])):
        name = race.begin()
        race.seen.clear()
        engine.loads[1].go_on_to(failing)
        engine.loads[1].fail_next(CopyError("injected"))
        race.play(((0, over), (failing + 1, 0)), when, partial(race.abort, name) if when else None)
        assert engine.reported == {name: 1}
        is_known = race.seen.keys().isdisjoint(("loading", "reported"))
        assert engine.count("recomputations:copy_failed") == is_known


def test_a_load_that_fails_when_it_may_be_read_stops_the_engine(start: Start) -> None:
    race = Race(start(2))
    race.engine.layers_before = 1
    race.begin()
    race.engine.worker.at_end = partial(race.engine.loads[0].go_on_to, 2)
    race.engine.step()
    race.engine.loads[0].fail_next(CopyError("injected"))
    with pytest.raises(CopyError, match="injected"):
        race.engine.step()
    assert race.engine.is_broken
